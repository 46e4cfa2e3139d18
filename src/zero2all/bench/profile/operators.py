"""Operators of a step by their own time, with the FLOPs that torch counts."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zero2all.base.torch_private import flash_attention_cpu, flash_attention_cpu_backward

TRACE_FILES = ("trace.json", "trace.json.gz")  # browsers open both
LARGE_TRACE_BYTES = 32 * 2**20  # compressed


@dataclass(frozen=True)
class Operator:
    """All calls of an operator in one step of one rank."""

    name: str
    calls: float
    seconds: float
    """Without the operators that it calls; on a GPU the time of its kernels."""
    share: float
    """The share in the time of all operators."""
    flops: float
    """0: torch counts only matrix products and attention. A product inside of a fused operator is in both rows."""
    peak_share: float | None
    """FLOPs per second, of the peak of the device; None if it is faster than what that was measured with."""


def flop_counter() -> FlopCounterMode:
    """Torch's counter, with the attention of the CPU, which it has no formula for."""

    def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad, q, k, v))  # type: ignore[no-untyped-call]

    formulas = {flash_attention_cpu: forward, flash_attention_cpu_backward: backward}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def start_profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True)
    profiler.start()
    return profiler


def list_operators(
    profiler: profile, counter: FlopCounterMode, steps: int, device: torch.device, peak_flops: float
) -> list[Operator]:
    """Operators that took time, slowest first. ``peak_flops`` is of one device.

    The profiler sees the matrix products inside of fused operators, the counter has formulas for fused operators and
    attention: of an operator that both know, the larger count is the complete one.
    """
    counted = {f"{op}".replace(".", "::", 1): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    on_gpu, rows = device.type == "cuda", []
    for event in profiler.key_averages():
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6 / steps
        flops = max((event.flops or 0) / steps, float(counted.get(event.key, 0)))
        if seconds > 0:
            rows.append((event.key, event.count / steps, seconds, flops))
    total = sum(seconds for _, _, seconds, _ in rows)
    rows.sort(key=lambda row: -row[2])
    return [
        Operator(
            name,
            calls,
            seconds,
            seconds / total,
            flops,
            flops / seconds / peak_flops if 0 < flops / seconds <= peak_flops else None,
        )
        for name, calls, seconds, flops in rows
    ]


def write_trace(profiler: profile, directory: Path) -> Path:
    """For chrome://tracing or https://ui.perfetto.dev."""
    path, compressed = (directory / name for name in TRACE_FILES)
    compressed.unlink(missing_ok=True)  # of an earlier profile
    profiler.export_chrome_trace(str(path))
    if path.stat().st_size <= LARGE_TRACE_BYTES:
        return path
    with path.open("rb") as plain, gzip.open(compressed, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()
    return compressed
