"""Learning rate as a closed form of the step: nothing to save, nothing to drift on resume."""

from __future__ import annotations

import math


def share_of_peak(step: int, total: int, warmup: int, final: float) -> float:
    """Linear warmup over ``warmup`` steps, then a cosine that reaches ``final`` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
