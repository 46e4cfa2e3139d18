"""Whether the difference between two groups of runs exceeds the noise between seeds: a two-sided t-test at 95%."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import correlation, fmean

from zero2all.track.experiment_record import Verdict

CONFIDENCE = 0.95
RESOLUTION = 1e-4  # of bits per byte: no smaller margin means anything


def compare_groups(reference: str, other: str, values: Mapping[str, Sequence[float]]) -> Verdict:
    """The difference of the means and its confidence interval.

    The variance is pooled: with two or three seeds, a variance of each group (Welch's test) would rest on one or two
    degrees of freedom. The margin is unknown unless both groups have two seeds.
    """
    first, second = values[reference], values[other]
    difference = fmean(second) - fmean(first)
    if min(len(first), len(second)) < 2:
        return Verdict(reference, other, difference, None)
    freedom = len(first) + len(second) - 2
    variance = (_sum_of_squares(first) + _sum_of_squares(second)) / freedom
    margin = t_quantile(freedom) * math.sqrt(variance * (1 / len(first) + 1 / len(second)))
    return Verdict(reference, other, difference, max(margin, RESOLUTION))


def standard_deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of the population that the values are a sample of; None for a single value."""
    return math.sqrt(_sum_of_squares(values) / (len(values) - 1)) if len(values) > 1 else None


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, in which equal values share theirs. 0 if one side does not vary.

    >>> round(rank_correlation([1, 2, 3, 4], [1, 3, 2, 9]), 3)
    0.8
    """
    ranks = [
        [sum(other < one for other in values) + sum(other == one for other in values) / 2 for one in values]
        for values in (first, second)
    ]
    return correlation(*ranks) if all(len(set(values)) > 1 for values in ranks) else 0.0


def _sum_of_squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t within which a variable of Student's distribution lies with this probability, on both sides of 0.

    >>> round(t_quantile(4), 3)
    2.776
    """
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(80):  # halving: beyond the precision of a float
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) < confidence else (low, middle)
    return high


def t_probability(t: float, freedom: int) -> float:
    """P(|T| < t), by the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
