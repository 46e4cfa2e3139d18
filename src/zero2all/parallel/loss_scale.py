"""Training in fp16: the loss is scaled up, so that small gradients are not rounded to nothing."""

from __future__ import annotations

import math

START, LEAST, MOST, PATIENCE = 2.0**16, 1.0, 2.0**24, 2000


class LossScale:
    """Halved when a gradient overflows, doubled after ``PATIENCE`` steps in which none did; the same on every rank."""

    def __init__(self) -> None:
        self.value = START
        self.fitted = 0

    def fits(self, norm: float) -> bool:
        """Whether a gradient with this norm can be used; if not, leave the update out: the next one is smaller."""
        if not math.isfinite(norm):
            self.value, self.fitted = self.value / 2, 0
            return False
        self.fitted += 1
        if self.fitted == PATIENCE:
            self.value, self.fitted = min(2 * self.value, MOST), 0
        return True

    @property
    def is_exhausted(self) -> bool:
        """No scale is at fault any more: the gradient itself is not finite."""
        return self.value < LEAST

    def state(self) -> dict[str, float]:
        return {"value": self.value, "fitted": self.fitted}

    def load(self, state: dict[str, float]) -> None:
        self.value, self.fitted = state["value"], int(state["fitted"])
