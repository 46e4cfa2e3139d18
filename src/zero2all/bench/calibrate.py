"""Measure what a plan needs to know of this machine: products, a training step, memory and link."""

from __future__ import annotations

import os

import torch

from zero2all.base.console import progress
from zero2all.base.machine.devices import compute_dtype, device_name, dtype_name, measure_matmul_flops, pick_device
from zero2all.bench.comm import COLLECTIVES, measure_collectives
from zero2all.bench.measurements import wall_seconds
from zero2all.bench.rank_harness import Backend, run_ranks
from zero2all.bench.step import BenchStep
from zero2all.planner.calibrated import MachineMeasurements
from zero2all.recipe import Recipe

PRODUCT_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
MESSAGE_BYTES: dict[Backend, int] = {"nccl": 1 << 28, "gloo": 1 << 24}
STEPS = 5


def measure_machine(reference: Recipe) -> MachineMeasurements:
    """Takes about a minute."""
    device = pick_device(reference.train.device)
    dtype = compute_dtype(reference.train.compute_precision, device)
    with progress("calibrate", 4) as advance:
        products = {size: measure_matmul_flops(device, dtype, size) for size in PRODUCT_SIZES[device.type]}
        advance(1)
        step = BenchStep(reference)
        step.run()  # warms up
        step_seconds = min(step.time_run() for _ in range(STEPS))
        del step
        advance(1)
        copied = _copy_bandwidth(device)
        advance(1)
        link = None if torch.cuda.device_count() == 1 else _link_bandwidth()
        advance(1)
    gpus = torch.cuda.device_count()
    return MachineMeasurements(
        device=device.type,
        device_name=device_name(device),
        dtype=dtype_name(dtype),
        product_flops=products,
        step_seconds=step_seconds,
        memory=_memory(device),
        memory_bandwidth=copied,
        link_bandwidth=link,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if gpus else 1,
        ranks_per_node=gpus or 1,  # a CPU was measured with all its cores
    )


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * len(source) / min(wall_seconds(lambda: target.copy_(source), device) for _ in range(5))


def _link_bandwidth() -> float:
    backend: Backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    times, _ = run_ranks(2, measure_collectives, [MESSAGE_BYTES[backend]], backend, backend=backend)
    reduce = COLLECTIVES[0]
    found = next(one for one in times if one.collective == reduce.name)
    return float(reduce.link_share(2) * found.size / found.seconds)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
