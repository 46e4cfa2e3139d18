"""Throughput, MFU and data wait of recent steps, and the log lines of a step."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from zero2all.base.console import say, say_detail
from zero2all.base.machine.cpus import OtherCpuUse, busy_note
from zero2all.base.machine.devices import MPS, PeakFlops, measure_peak_again
from zero2all.model.cost.flops import Recompute, flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig
from zero2all.track.step_text import detail_line, objective_line, source_line, step_line
from zero2all.train.plan import Plan

PEAK_CHECK_SECONDS = 30.0  # between two measurements of the peak
EMA_DECAY = 0.9  # averages over about ten steps

UTILIZATION = ("mfu", "mfu_palm", "hfu")
SOURCES_EVERY = 10  # log lines; all of them with --verbose
PER_RANK_METRICS = ("memory", "memory_reserved", "data_wait")
"""Metrics that differ from rank to rank, beside ``StepTime.metrics``; all others are global, and the record of rank 0
has them."""


@dataclass(frozen=True)
class FlopsCount:
    """Counts the FLOPs of a token in training. Recomputation is in groups of ``recompute_every`` blocks."""

    config: ModelConfig
    recompute: Recompute = "none"
    recompute_every: int = 1

    @cached_property
    def parameters(self) -> int:
        return count_parameters(self.config).active

    def per_token(self, seq_len: int) -> tuple[int, int, int]:
        """The model's FLOPs as MFU counts them, the same by PaLM's formula, and all that the hardware computes."""
        flops = flops_per_token(self.config, seq_len)
        palm_flops = palm_flops_per_token(self.config, self.parameters, seq_len)
        return flops.model, palm_flops, flops.hardware(self.recompute, every=self.recompute_every)


class ThroughputMeter:
    """Throughput, utilisation and time left, averaged over recent steps; the slow first step is not in the average."""

    def __init__(
        self,
        plan: Plan,
        flops: FlopsCount,
        device: torch.device,
        peak: PeakFlops,
        dtype: torch.dtype,
        world_size: int = 1,
    ) -> None:
        """``peak`` is what one of the ``world_size`` devices reaches in ``dtype``."""
        self.plan, self.flops, self.device, self.dtype = plan, flops, device, dtype
        self.peak, self.world_size = peak, world_size
        self.tokens_per_second = self.data_wait = 0.0
        self._others = OtherCpuUse() if device.type == "cpu" else None
        self._is_quiet = False  # whether other programs left the CPU alone until the last log line
        self._peak_checked = -math.inf
        self._updates = self._lines = 0
        self._last_update = time.perf_counter()  # or the end of what came after it: only training counts

    def update(self, step: int, data_wait_seconds: float) -> None:
        """Update the averages after a step, which waited ``data_wait_seconds`` for its batch."""
        now = time.perf_counter()
        step_seconds, self._last_update = now - self._last_update, now
        start, stop = self.plan.stage_of(step).sample_range(step)
        rate = (stop - start) * self.plan.stage_of(step).recipe.seq_len / step_seconds
        self._updates += 1
        # The first step includes warm-up.
        decay = 0.0 if self._updates <= 2 else EMA_DECAY
        self.tokens_per_second = decay * self.tokens_per_second + (1 - decay) * rate
        self.data_wait = decay * self.data_wait + (1 - decay) * data_wait_seconds / step_seconds

    def check_peak(self, step: int) -> None:
        """Measure the peak again where it was too low: training is faster, or the machine is no longer busy.

        Not at every step, since it takes a second.
        """
        is_wrong = max(self._device_rates(step)) > self.peak.flops or (self.peak.was_busy and self._is_quiet)
        now = time.monotonic()
        if not (is_wrong and self.peak.is_measured and now - self._peak_checked > PEAK_CHECK_SECONDS):
            return
        self._peak_checked, before = now, self.peak
        self.peak = measure_peak_again(self.peak, self.device, self.dtype)
        if self.peak.flops > before.flops:
            say(f"utilisation is now against {self.peak.source}: {self.peak.flops / before.flops:.2f} times as fast")

    def _device_rates(self, step: int) -> tuple[float, float, float]:
        """FLOPs per second of a device: as MFU counts them, by PaLM's formula, and with what is recomputed."""
        rate = self.tokens_per_second / self.world_size
        model, palm, hardware = self.flops.per_token(self.plan.stage_of(step).recipe.seq_len)
        return rate * model, rate * palm, rate * hardware

    def restart_timer(self) -> None:
        """Do not count the time since the last update (a checkpoint, an evaluation) as training."""
        self._last_update = time.perf_counter()

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics for the record. TFLOP/s is per device; MFU counts the model's FLOPs, HFU also recomputed ones.

        Utilization is left out if training is faster than the peak, which is then wrong.
        """
        rates, utilization = self._device_rates(step), {}
        if max(rates) <= self.peak.flops:
            utilization = {
                name: round(rate / self.peak.flops, 4) for name, rate in zip(UTILIZATION, rates, strict=True)
            }
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tflops": round(rates[0] / 1e12, 4),
            **utilization,
            "memory": peak_memory_bytes(self.device),
            **reserved_memory(self.device),
            "data_wait": round(self.data_wait, 4),
        }

    def say_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the log lines of a step from all its metrics."""
        busy = "" if self._others is None else busy_note(self._others.share())
        self._is_quiet = not busy
        total = self.plan.total_steps
        left = (self.plan.tokens_before(total) - self.plan.tokens_before(step + 1)) / self.tokens_per_second
        say(step_line(step + 1, total, metrics, left))
        if rewards := objective_line(metrics):
            say(rewards)
        if by_source := source_line(metrics):
            (say if self._lines % SOURCES_EVERY == 0 or step + 1 == total else say_detail)(by_source)
        say_detail(detail_line(metrics, busy))
        self._lines += 1


def reserved_memory(device: torch.device) -> dict[str, float]:
    """Peak bytes that the CUDA allocator holds, for tensors and in its cache: what the GPU lacks for anything else."""
    return {"memory_reserved": torch.cuda.max_memory_reserved(device)} if device.type == "cuda" else {}


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes so far: of the CUDA allocator, or resident in main memory.

    On the GPU of a Mac what Metal holds now, with the allocator's cache, which torch returns only when memory is short.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == MPS:
        return torch.mps.driver_allocated_memory()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
