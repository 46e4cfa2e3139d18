"""A learning-rate schedule: linear warmup, then a shape, which is a plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from zero2all.base.plugins import BoundPlugin, bind
from zero2all.recipe import ScheduleRecipe

CONSTANT = "constant"  # has no minimum


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
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the shape."""

    @classmethod
    def from_recipe(cls, recipe: ScheduleRecipe, steps: int, warmup: int, previous_lr_multiplier: float) -> LRSchedule:
        """A stage starts at ``previous_lr_multiplier``, where the one before ended, unless it sets its own ``peak``."""
        peak = previous_lr_multiplier if recipe.peak is None else recipe.peak
        minimum = peak if recipe.shape == CONSTANT else recipe.min_lr_ratio
        return cls(recipe.shape, steps, warmup, peak, minimum, recipe.decay_ratio, options=recipe.options)

    def lr_multiplier(self, step: int) -> float:
        """Factor on the optimizer's learning rate at a step of the stage."""
        if step < self.warmup:
            return self.start + (self.peak - self.start) * (step + 1) / self.warmup
        return float(self._shape(self, step))

    @cached_property
    def _shape(self) -> BoundPlugin:
        return bind("schedule", {**self.options, "name": self.shape})

    def done(self, step: int, first: int) -> float:
        """The part of the steps after ``first`` that is done, from 0 to 1 at the last step."""
        return min(1.0, max(0, step - first) / max(1, self.steps - 1 - first))

    def linear_decay(self, step: int, first: int) -> float:
        """From the peak at step ``first`` to the minimum at the last step."""
        return self.peak + (self.min_lr_ratio - self.peak) * self.done(step, first)
