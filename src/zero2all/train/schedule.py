"""Learning rate as a closed form of the step: nothing to save, nothing to drift on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero2all.recipe import ScheduleRecipe


@dataclass(frozen=True)
class Schedule:
    """Linear warmup to ``peak`` over ``warmup`` steps, then a shape that reaches ``final`` at the last step."""

    shape: str
    steps: int
    warmup: int
    peak: float
    final: float
    decay: float

    @classmethod
    def of(cls, recipe: ScheduleRecipe, steps: int, warmup: int, previous: float) -> Schedule:
        """``previous`` is where the stage before ended; a stage starts there unless it says otherwise."""
        peak = previous if recipe.peak is None else recipe.peak
        final = peak if recipe.shape == "constant" else recipe.final
        return cls(recipe.shape, steps, warmup, peak, final, recipe.decay)

    def share(self, step: int) -> float:
        """Share of the optimizer's learning rate at a step of the stage."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "inverse-sqrt":
            return self.peak * math.sqrt(max(1, self.warmup) / max(1, step, self.warmup))
        first = self.warmup
        if self.shape == "wsd":
            first = max(first, self.steps - 1 - round(self.decay * self.steps))
        done = min(1.0, max(0, step - first) / max(1, self.steps - 1 - first))
        if self.shape == "cosine":
            return self.final + (self.peak - self.final) * 0.5 * (1 + math.cos(math.pi * done))
        return self.peak + (self.final - self.peak) * done

    @property
    def end(self) -> float:
        return self.share(self.steps - 1)
