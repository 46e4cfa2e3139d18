"""Entries of the hardware table that were measured: written by ``z2a doctor --calibrate``, read by ``z2a plan``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.machine.devices import device_name, hardware_key
from zero2all.base.machine.gpu_specs import Gpu, find_gpu, lookup_gpu
from zero2all.base.paths import config_directory
from zero2all.base.records import decode_json, parse_record
from zero2all.planner.cluster import LINK_EFFICIENCY, Cluster
from zero2all.planner.plan import plan_run
from zero2all.planner.step_time import MEMORY_EFFICIENCY
from zero2all.recipe import Recipe

MAX_ENTRY_BYTES = 1 << 16
MEASURED_LINK, UNKNOWN_LINK = "measured", "not measured"
LARGEST_SHARE = 4.0  # of the best product: a step cannot be faster, but a measured peak can be too low


@dataclass(frozen=True)
class MachineMeasurements:
    device: str
    """Type: cpu or cuda."""
    device_name: str
    dtype: str
    """In which products and the step were computed."""
    product_flops: dict[int, float]
    """FLOPs per second of square matrix products, by size."""
    step_seconds: float
    """The time of a training step of the reference recipe, the fastest of a few."""
    memory: int
    memory_bandwidth: float
    """Bytes per second, read and written."""
    link_bandwidth: float | None
    """Bus bandwidth of a large all-reduce between two ranks; None with a single GPU."""
    multiprocessors: int
    ranks_per_node: int


def calibrated_entry(name: str, found: MachineMeasurements, reference: Recipe) -> Gpu:
    """The one free number, the efficiency of products in a step, is that with which the plan of the reference recipe
    takes as long as was measured. It is then used for every other recipe."""
    flops, link, step_seconds = max(found.product_flops.values()), found.link_bandwidth, found.step_seconds
    entry = Gpu(
        name,
        flops,
        found.multiprocessors,
        16,
        found.memory,
        found.memory_bandwidth / MEMORY_EFFICIENCY,  # what was measured is what is reached
        UNKNOWN_LINK if link is None else MEASURED_LINK,
        (link or 1.0) / LINK_EFFICIENCY,
        (link or 1.0) / LINK_EFFICIENCY,
        f"measured on {found.device_name}",
        matmul_source=f"a training step of {reference.name} took {step_seconds:.3g} s",
        gpus_per_node=found.ranks_per_node,
        fp32_flops=flops if found.dtype == "fp32" else None,
    )
    # A plan takes ``auto`` for bf16, which a CPU may not have: the step is planned in what it was measured in.
    train = reference.train.model_copy(update={"precision": found.dtype})
    reference = reference.model_copy(update={"train": train})
    low, high = math.log(1e-4), math.log(LARGEST_SHARE)
    for _ in range(60):  # halving
        middle = (low + high) / 2
        planned = plan_run(reference, Cluster.of(replace(entry, matmul_share=math.exp(middle)), 1)).step.expected
        low, high = (middle, high) if planned > step_seconds else (low, middle)
    if math.exp(high) > 0.99 * LARGEST_SHARE:
        raise Z2aError(
            f"a training step of {reference.name} took {step_seconds:.3g} s, less than the measured matrix products "
            "and memory allow: other programs used the machine, so measure again"
        )
    return replace(entry, matmul_share=math.exp(high))


def user_entry_path(hardware: str) -> Path:
    """Where the entry of a machine is kept for the runs on it; in the home directory, which many machines may share."""
    return config_directory() / "hardware" / f"{re.sub(r'[^A-Za-z0-9]+', '-', hardware).strip('-').lower()}.json"


def machine_entry(device: torch.device) -> Gpu | None:
    """The calibrated entry of this machine, else the data sheet of its GPU, if there is one."""
    path = user_entry_path(hardware_key(device))
    if path.is_file():
        return find_entry(str(path))
    return lookup_gpu(device_name(device)) if device.type == "cuda" else None


def check_links(entry: Gpu, cluster: Cluster, *, has_network: bool) -> None:
    """A calibrated entry knows no network, and of a single GPU no link."""
    if entry.link == UNKNOWN_LINK and cluster.gpus > 1:
        raise UsageError(f"{entry.name} was measured with a single GPU, so the link to others is unknown: use --gpus 1")
    if entry.link == MEASURED_LINK and cluster.nodes > 1 and not has_network:
        raise UsageError(f"{entry.name} was measured on one node: give the bandwidth between nodes with --net")


def find_entry(name: str) -> Gpu:
    """A GPU of the table by its name, or the entry in a JSON file that ``z2a doctor --calibrate`` wrote."""
    path = Path(name)
    if path.suffix != ".json":
        return find_gpu(name)
    try:
        with open(path, "rb") as stream:
            value = decode_json(stream.read(MAX_ENTRY_BYTES))
        return parse_record(Gpu, value, name)
    except FileNotFoundError:
        raise UsageError(f"--gpu: {name} does not exist; 'z2a doctor --calibrate {name}' writes it") from None
    except (ValueError, Z2aError, OSError) as error:
        raise UsageError(f"--gpu: {name} is not an entry of 'z2a doctor --calibrate': {error}") from None
