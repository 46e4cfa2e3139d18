"""A linear decay from the peak to ``min_lr_ratio`` at the last step."""

from __future__ import annotations

from zero2all.base.plugins import register
from zero2all.optim.lr_schedule import LRSchedule


@register("schedule", "linear")
def linear(schedule: LRSchedule, step: int) -> float:
    """A linear decay from the peak to ``min_lr_ratio`` at the last step."""
    return schedule.linear_decay(step, schedule.warmup)
