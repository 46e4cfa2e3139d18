"""The learning rate as a closed form of the step: no scheduler state to save or to drift on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero2all.recipe import ScheduleRecipe


@dataclass(frozen=True)
class LRSchedule:
    """Linear warmup to ``peak`` over ``warmup`` steps, then a shape that reaches ``min_lr_ratio`` at the last step."""

    shape: str
    steps: int
    warmup: int
    peak: float
    min_lr_ratio: float
    decay_ratio: float

    @classmethod
    def from_recipe(cls, recipe: ScheduleRecipe, steps: int, warmup: int, previous_lr_multiplier: float) -> LRSchedule:
        """A stage starts at ``previous_lr_multiplier``, where the one before ended, unless it sets its own ``peak``."""
        peak = previous_lr_multiplier if recipe.peak is None else recipe.peak
        min_lr_ratio = peak if recipe.shape == "constant" else recipe.min_lr_ratio
        return cls(recipe.shape, steps, warmup, peak, min_lr_ratio, recipe.decay_ratio)

    def lr_multiplier(self, step: int) -> float:
        """Factor on the optimizer's learning rate at a step of the stage."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "inverse-sqrt":
            return self.peak * math.sqrt(max(1, self.warmup) / max(1, step, self.warmup))
        first = self.warmup
        if self.shape == "wsd":
            first = max(first, self.steps - 1 - round(self.decay_ratio * self.steps))
        done = min(1.0, max(0, step - first) / max(1, self.steps - 1 - first))
        if self.shape == "cosine":
            return self.min_lr_ratio + (self.peak - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        return self.peak + (self.min_lr_ratio - self.peak) * done

    @property
    def end_lr_multiplier(self) -> float:
        return self.lr_multiplier(self.steps - 1)
