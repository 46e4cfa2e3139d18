"""The learning rate as a closed form of the step: no scheduler state to save or to drift on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zero2all.recipe import ExtendMode, ScheduleRecipe


@dataclass(frozen=True)
class LRSchedule:
    """Linear warmup to ``peak`` over ``warmup`` steps, then a shape that reaches ``min_lr_ratio`` at the last step."""

    shape: str
    steps: int
    warmup: int
    peak: float
    min_lr_ratio: float
    decay_ratio: float
    start: float = 0.0
    """Multiplier from which the warmup rises."""

    @classmethod
    def from_recipe(cls, recipe: ScheduleRecipe, steps: int, warmup: int, previous_lr_multiplier: float) -> LRSchedule:
        """A stage starts at ``previous_lr_multiplier``, where the one before ended, unless it sets its own ``peak``."""
        peak = previous_lr_multiplier if recipe.peak is None else recipe.peak
        min_lr_ratio = peak if recipe.shape == "constant" else recipe.min_lr_ratio
        return cls(recipe.shape, steps, warmup, peak, min_lr_ratio, recipe.decay_ratio)

    def lr_multiplier(self, step: int) -> float:
        """Factor on the optimizer's learning rate at a step of the stage."""
        if step < self.warmup:
            return self.start + (self.peak - self.start) * (step + 1) / self.warmup
        if self.shape == "inverse-sqrt":
            return self.peak * math.sqrt(max(1, self.warmup) / max(1, step, self.warmup))
        first = self.warmup
        if self.shape == "wsd":
            first = max(first, self.steps - 1 - round(self.decay_ratio * self.steps))
        done = min(1.0, max(0, step - first) / max(1, self.steps - 1 - first))
        if self.shape == "cosine":
            return self.min_lr_ratio + (self.peak - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        return self.peak + (self.min_lr_ratio - self.peak) * done


@dataclass(frozen=True)
class SchedulePart:
    """A schedule that holds from a step of the stage on."""

    first_step: int
    origin: int
    """The step of the stage that is step 0 of the schedule."""
    schedule: LRSchedule


@dataclass(frozen=True)
class StageSchedule:
    """The learning rate of a stage: one schedule, or several one after another if a begun stage was extended.

    >>> schedule = StageSchedule.of(LRSchedule("cosine", 600, 20, 1.0, 0.1, 0.2))
    >>> longer = schedule.extended(600, "rewarm", LRSchedule("cosine", 1000, 20, 1.0, 0.1, 0.2))
    """

    steps: int
    parts: tuple[SchedulePart, ...]

    @classmethod
    def of(cls, schedule: LRSchedule) -> StageSchedule:
        return cls(schedule.steps, (SchedulePart(0, 0, schedule),))

    def extended(self, step: int, mode: ExtendMode, planned: LRSchedule) -> StageSchedule:
        """The same up to ``step``; from there on what ``mode`` makes of the schedule ``planned`` for the full stage."""
        origin, last = (0 if mode == "as-planned" else step), self.lr_multiplier(step - 1)
        if mode == "constant":
            planned = replace(planned, shape="constant", warmup=0, peak=last, min_lr_ratio=last)
        elif mode == "rewarm":
            planned = replace(planned, start=last)
        part = SchedulePart(step, origin, replace(planned, steps=planned.steps - origin))
        return StageSchedule(planned.steps, (*self.parts, part))

    def lr_multiplier(self, step: int) -> float:
        """Factor on the optimizer's learning rate at a step of the stage."""
        part = next(part for part in reversed(self.parts) if part.first_step <= step)
        return part.schedule.lr_multiplier(step - part.origin)

    @property
    def end_lr_multiplier(self) -> float:
        return self.lr_multiplier(self.steps - 1)
