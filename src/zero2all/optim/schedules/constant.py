"""The peak to the end."""

from __future__ import annotations

from zero2all.base.plugins import register
from zero2all.optim.lr_schedule import LRSchedule


@register("schedule", "constant")
def constant(schedule: LRSchedule, step: int) -> float:
    """The peak to the end."""
    return schedule.peak
