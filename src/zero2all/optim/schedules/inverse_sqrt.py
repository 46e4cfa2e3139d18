"""A decay with the square root of the step."""

from __future__ import annotations

import math

from zero2all.base.plugins import register
from zero2all.optim.lr_schedule import LRSchedule


@register("schedule", "inverse-sqrt")
def inverse_sqrt(schedule: LRSchedule, step: int) -> float:
    """A decay with the square root of the step."""
    return schedule.peak * math.sqrt(max(1, schedule.warmup) / max(1, step, schedule.warmup))
