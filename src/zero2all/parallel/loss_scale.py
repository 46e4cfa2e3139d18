"""Dynamic loss scaling for fp16, so that small gradients do not underflow."""

from __future__ import annotations

import math

INITIAL_SCALE, MIN_SCALE, MAX_SCALE, GROWTH_INTERVAL = 2.0**16, 1.0, 2.0**24, 2000


class DynamicLossScaler:
    """Halved when a gradient overflows, doubled after ``GROWTH_INTERVAL`` steps without one; the same on every rank."""

    def __init__(self) -> None:
        self.value = INITIAL_SCALE
        self.good_steps = 0

    def update(self, norm: float) -> bool:
        """Whether a gradient with this norm can be used; if not, skip the update: the next scale is smaller."""
        if not math.isfinite(norm):
            self.value, self.good_steps = self.value / 2, 0
            return False
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(2 * self.value, MAX_SCALE), 0
        return True

    @property
    def is_exhausted(self) -> bool:
        """Lowering the scale does not help: the gradient itself is not finite."""
        return self.value < MIN_SCALE

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "fitted": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = state["value"], int(state["fitted"])
