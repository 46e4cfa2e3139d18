"""Where the time of a step goes, and the line that a person reads."""

from __future__ import annotations

import resource
import sys
import time

import torch

from zero2all.model.flops import Recompute, flops_per_token
from zero2all.recipe import ModelConfig
from zero2all.train.plan import Plan
from zero2all.units import show_bytes, show_count, show_seconds

FORGETS = 0.9  # the average forgets over about ten steps

OF_EACH_RANK = ("memory", "data_wait")
"""Figures that differ from rank to rank; all others are of the whole run, and the first rank's record has them."""


class Clock:
    """Speed, utilisation and time left, over the recent steps: one slow first step does not spoil the figures."""

    def __init__(
        self, plan: Plan, config: ModelConfig, device: torch.device, peak_flops: float, recompute: Recompute = "none"
    ) -> None:
        self.plan, self.config, self.device, self.peak, self.recompute = plan, config, device, peak_flops, recompute
        self.tokens_per_second = self.data_wait = 0.0
        self._ticks = 0
        self._between = time.perf_counter()  # since when nothing but training has been going on

    def tick(self, step: int, waited: float) -> None:
        """A step is over; ``waited`` is how long its batch was not ready."""
        now = time.perf_counter()
        took, self._between = now - self._between, now
        start, stop = self.plan.at(step).batch(step)
        rate = (stop - start) * self.plan.at(step).stage.seq_len / took
        self._ticks += 1
        # The first step includes warming up.
        kept = 0.0 if self._ticks <= 2 else FORGETS
        self.tokens_per_second = kept * self.tokens_per_second + (1 - kept) * rate
        self.data_wait = kept * self.data_wait + (1 - kept) * waited / took

    def rest(self) -> None:
        """What was done since the last tick (a checkpoint, an evaluation) is no training."""
        self._between = time.perf_counter()

    def figures(self, step: int) -> dict[str, float]:
        """For the record. MFU counts what the mathematics needs, HFU also what is computed a second time."""
        flops = flops_per_token(self.config, self.plan.at(step).stage.seq_len)
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "mfu": round(self.tokens_per_second * flops.model / self.peak, 4),
            "hfu": round(self.tokens_per_second * flops.hardware(self.recompute) / self.peak, 4),
            "memory": memory_used(self.device),
            "data_wait": round(self.data_wait, 4),
        }

    def line(self, step: int, loss: float, lr: float, grad_norm: float, channels: dict[str, float]) -> str:
        total, figures = self.plan.total, self.figures(step)
        by_source = [f"{name.removeprefix('loss/')} {value:.3f}" for name, value in channels.items() if "loss/" in name]
        left = (self.plan.tokens_before(total) - self.plan.tokens_before(step + 1)) / self.tokens_per_second
        return "  ".join(
            [
                f"step {step + 1}/{total} {100 * (step + 1) / total:5.1f}%",
                f"loss {loss:.6f}" + (f" ({', '.join(by_source)})" if len(by_source) > 1 else ""),
                f"lr {lr:.2e}",
                f"grad {grad_norm:.3f}",
                f"{show_count(self.tokens_per_second)} tok/s",
                f"MFU {100 * figures['mfu']:.1f}% HFU {100 * figures['hfu']:.1f}%",
                show_bytes(figures["memory"]),
                f"wait {100 * self.data_wait:.1f}%",
                f"left {show_seconds(left)}",
            ]
        )


def memory_used(device: torch.device) -> int:
    """Most bytes in use so far: of the GPU's allocator, or resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
