"""A cosine from the peak to ``min_lr_ratio`` at the last step."""

from __future__ import annotations

import math

from zero2all.base.plugins import register
from zero2all.optim.lr_schedule import LRSchedule


@register("schedule", "cosine")
def cosine(schedule: LRSchedule, step: int) -> float:
    """A cosine from the peak to ``min_lr_ratio`` at the last step."""
    done = schedule.done(step, schedule.warmup)
    return schedule.min_lr_ratio + (schedule.peak - schedule.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
