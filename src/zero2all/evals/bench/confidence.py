"""Confidence intervals of metrics over items, and of differences between two evaluations of the same items.

Shapes: S bootstrap samples, N items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SAMPLES = 1000
MAX_DRAWN = 2_000_000  # items at a time; bounds the memory
Z_95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {(self.high - self.low) / 2:.3f}"

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def proportion(successes: Array) -> Estimate:
    """The mean of zeros and ones, with Wilson's interval, which is wide where few items are all wrong or all right."""
    count, share = len(successes), float(np.mean(successes))
    center = (share + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
    spread = share * (1 - share) / count + Z_95**2 / (4 * count**2)
    margin = Z_95 / (1 + Z_95**2 / count) * math.sqrt(spread)
    return Estimate(share, max(0.0, center - margin), min(1.0, center + margin))


def ratio(numerators: Array, denominators: Array, seed: int = 0) -> Estimate | None:
    """The ratio of two sums over items, by the bootstrap; None without any denominator."""
    if not denominators.sum() > 0:
        return None
    return _interval(numerators.sum() / denominators.sum(), ratio_samples(numerators, denominators, seed))


def paired_difference(first: tuple[Array, Array], second: tuple[Array, Array], seed: int = 0) -> Estimate | None:
    """The second ratio minus the first, over the same items in the same order: both are resampled together."""
    (first_n, first_d), (second_n, second_d) = first, second
    if not (first_d.sum() > 0 and second_d.sum() > 0):
        return None
    samples = ratio_samples(second_n, second_d, seed) - ratio_samples(first_n, first_d, seed)
    return _interval(second_n.sum() / second_d.sum() - first_n.sum() / first_d.sum(), samples)


def mean_of_ratios(ratios: list[tuple[Array, Array]], seed: int = 0) -> Estimate:
    """The mean of the ratios of several sets of items, each resampled by itself."""
    samples = [ratio_samples(one, other, seed + number) for number, (one, other) in enumerate(ratios)]
    value = float(np.mean([one.sum() / other.sum() for one, other in ratios]))
    return _interval(value, np.mean(samples, axis=0))


def ratio_samples(numerators: Array, denominators: Array, seed: int) -> Array:
    """The ratio in each bootstrap sample, [S]. Equal seeds and numbers of items draw equal samples."""
    rng, count = np.random.default_rng(seed), len(numerators)
    block = max(1, min(SAMPLES, MAX_DRAWN // count))
    parts = []
    for start in range(0, SAMPLES, block):
        drawn_SN = rng.integers(count, size=(min(block, SAMPLES - start), count), dtype=np.int32)
        with np.errstate(invalid="ignore", divide="ignore"):
            parts.append(numerators[drawn_SN].sum(1) / denominators[drawn_SN].sum(1))
    return np.concatenate(parts)


def _interval(value: float, samples: Array) -> Estimate:
    finite = samples[np.isfinite(samples)]
    low, high = np.quantile(finite, [0.025, 0.975]) if len(finite) else (value, value)
    return Estimate(float(value), min(float(low), float(value)), max(float(high), float(value)))
