"""Warmup, stable, decay: the peak, and a linear decay over the last ``decay_ratio`` of the stage."""

from __future__ import annotations

from zero2all.base.plugins import register
from zero2all.optim.lr_schedule import LRSchedule


@register("schedule", "wsd")
def wsd(schedule: LRSchedule, step: int) -> float:
    """Warmup, stable, decay: the peak, and a linear decay over the last ``decay_ratio`` of the stage."""
    first = schedule.steps - 1 - round(schedule.decay_ratio * schedule.steps)
    return schedule.linear_decay(step, max(schedule.warmup, first))
