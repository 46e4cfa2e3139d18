"""Whether a value rises over the checkpoints of a run: the Mann-Kendall test, corrected for many tests by Holm.

The p-value is that of a curve whose values are in random order. Checkpoints of one run follow from each other, so that
a value that drifts for no reason passes more often than the p-value says: compare with another seed before you believe
a single curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

MAX_EXACT = 60  # values; with more, or with equal ones, the normal approximation is as good
MIN_POINTS = 3

SIGNIFICANT = 0.05  # below this p-value a trend counts


@dataclass(frozen=True)
class Trend:
    """How consistently values rise."""

    tau: float
    """Kendall's tau: 1 if every value is above all earlier ones, -1 if below."""
    p: float
    """One-sided: the probability of a tau at least as large if the order were random."""


def mann_kendall(values: Sequence[float]) -> Trend | None:
    """The trend of values in the order of time; None for fewer than three.

    >>> mann_kendall([0.1, 0.3, 0.2, 0.5, 0.6])
    Trend(tau=0.8, p=0.041666666666666664)
    """
    column = np.asarray(values, dtype=np.float64)
    count = len(column)
    if count < MIN_POINTS:
        return None
    pairs = count * (count - 1) // 2
    score = int(np.sign(column[None] - column[:, None])[np.triu_indices(count, 1)].sum())
    _, ties = np.unique(column, return_counts=True)
    if count <= MAX_EXACT and ties.max() == 1:
        inversions = (pairs - score) // 2  # of the values in the wrong order
        return Trend(score / pairs, float(_inversion_shares(count)[: inversions + 1].sum()))
    weights = count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())
    deviation = math.sqrt(weights / 18)
    # A tau of 0 is the middle; the correction of 1 makes the continuous distribution as wide as the discrete one.
    z = 0.0 if deviation == 0 else (score - np.sign(score)) / deviation
    return Trend(score / pairs, 0.5 * math.erfc(z / math.sqrt(2)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values for several tests at once: below 0.05, the chance of any false one among them is below 5 %.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


@lru_cache(maxsize=MAX_EXACT)
def _inversion_shares(count: int) -> np.ndarray[Any, Any]:
    """The share of the orders of ``count`` values that have 0, 1, 2, ... pairs in the wrong order."""
    shares = np.ones(1)
    for size in range(2, count + 1):
        shares = np.convolve(shares, np.full(size, 1 / size))
    return shares
