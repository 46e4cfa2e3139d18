"""The spike guard: steps whose loss or gradient lies far off the course of those before them.

Both directions count: a loss that jumps up has met garbage, one that drops has met text that repeats itself. A value
is held against the median of the few before it, and that difference against those of many steps before, by median and
median deviation, so that neither a falling loss nor one earlier outlier moves the limit. Every rank sees the same
figures and decides the same.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero2all.recipe import GuardRecipe

COURSE = 9  # steps whose median is the course
FEWEST = 24  # differences from it that are needed to judge another
DEVIATION = 1.4826  # times the median deviation is the standard deviation of a normal distribution
LATE = 2  # steps by which bad data may come before it is noticed


@dataclass
class Watch:
    """One figure. ``least`` is the smallest difference that is worth a word, whatever the deviation."""

    window: int
    threshold: float
    values: deque[float] = field(default_factory=deque)

    def odd(self, value: float, least: float) -> bool:
        """Whether a value lies off the course of those taken so far."""
        if len(self.values) < COURSE + FEWEST:
            return False
        known = np.array(self.values)
        course = np.median(sliding_window_view(known, COURSE), axis=-1)
        differences = known[COURSE:] - course[:-1]
        usual = float(np.median(differences))
        deviation = DEVIATION * float(np.median(np.abs(differences - usual)))
        return abs(value - float(course[-1]) - usual) > max(least, self.threshold * deviation)

    def take(self, value: float) -> None:
        self.values.append(value)
        while len(self.values) > self.window + COURSE:
            self.values.popleft()


class Guard:
    """
    >>> guard = Guard(GuardRecipe(policy="skip"))
    >>> guard.look(step=100, stage=0, loss=9.7, grad_norm=0.8)
    'loss 9.7 where 3.1 was to be expected'
    """

    def __init__(self, recipe: GuardRecipe) -> None:
        self.recipe = recipe
        self._loss = Watch(recipe.window, recipe.threshold)
        self._norm = Watch(recipe.window, recipe.threshold)
        self._stage = -1

    def look(self, step: int, stage: int, loss: float, grad_norm: float) -> str | None:
        """What is odd about a step, before its update; nothing if it is as usual. A stage sets out on a new course."""
        if stage != self._stage:
            self._stage = stage
            self._loss.values.clear()
            self._norm.values.clear()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss}, gradient norm {grad_norm}"
        norm = math.log(max(grad_norm, 1e-30))
        found = None
        if self._loss.odd(loss, self.recipe.least_loss * float(np.median(self._loss.values or [0.0]))):
            found = f"loss {loss:.4f} where about {np.median(list(self._loss.values)[-COURSE:]):.4f} was to be expected"
        elif self._norm.odd(norm, math.log(self.recipe.least_norm)):
            usual = math.exp(float(np.median(list(self._norm.values)[-COURSE:])))
            found = f"gradient norm {grad_norm:.4g} where about {usual:.4g} was to be expected"
        # What is only warned of becomes part of the course: a lasting change is told once.
        if found is None or self.recipe.policy == "warn":
            self._loss.take(loss)
            self._norm.take(norm)
        return found

    def state(self) -> dict[str, Any]:
        return {"stage": self._stage, "loss": list(self._loss.values), "norm": list(self._norm.values)}

    def restore(self, state: dict[str, Any]) -> None:
        self._stage = state["stage"]
        self._loss.values, self._norm.values = deque(state["loss"]), deque(state["norm"])
