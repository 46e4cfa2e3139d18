"""Loss against training compute: a power law with a floor, and its confidence band.

The fit is L(C) = floor + scale * C^-exponent. The floor is profiled: for each candidate the other two are a linear
least-squares fit of log(L - floor), weighted so that residuals count in L. The band covers every floor that the data
does not exclude at 95%, and the error of the other two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zero2all.base.errors import UsageError
from zero2all.experiments.statistics import RESOLUTION, t_quantile

MIN_POINTS, MIN_SIZES = 4, 3
PARAMETERS = 3  # of the law
MAX_EXTRAPOLATION = 10.0  # times the largest compute that was trained
MAX_EXPONENT = 1.5  # a steeper fit follows noise
FLOORS = 400  # candidates, evenly spaced

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A trained model."""

    compute: float
    """FLOPs of training."""
    loss: float


@dataclass(frozen=True)
class PowerLaw:
    floor: float
    scale: float
    exponent: float

    def __call__(self, compute: float) -> float:
        return float(self.floor + self.scale * compute**-self.exponent)


@dataclass(frozen=True)
class Prediction:
    compute: float
    loss: float
    low: float
    """The 95% interval of a single new run."""
    high: float

    @property
    def margin(self) -> float:
        """The larger half of the interval, as a fraction of the loss."""
        return max(self.high - self.loss, self.loss - self.low) / self.loss


@dataclass(frozen=True)
class _Candidate:
    law: PowerLaw
    sum_of_squares: float
    covariance: Array
    """The covariance of log scale and exponent, for residuals of variance 1."""

    def variance(self, compute: float) -> float:
        """The variance of the predicted mean, for residuals of variance 1."""
        gain = self.law(compute) - self.law.floor
        gradient = np.array([gain, -gain * math.log(compute)])
        return float(gradient @ self.covariance @ gradient)


@dataclass(frozen=True)
class ScalingFit:
    """The law that fits best, and all that are plausible."""

    law: PowerLaw
    noise: float
    """Standard deviation of a run around the law."""
    points: list[Point]
    candidates: list[_Candidate]
    quantile: float

    def predict(self, compute: float) -> Prediction:
        """Fails beyond ten times the largest compute that was trained."""
        largest = max(point.compute for point in self.points)
        if compute > MAX_EXTRAPOLATION * largest:
            raise UsageError(
                f"{compute:.3g} FLOPs is {compute / largest:.0f} times the largest trained compute ({largest:.3g}), "
                f"and a fit says nothing beyond {MAX_EXTRAPOLATION:.0f} times: train a larger size first"
            )
        lows, highs = [], []
        for candidate in self.candidates:
            centre = candidate.law(compute)
            error = self.quantile * self.noise * math.sqrt(1 + candidate.variance(compute))
            lows.append(centre - error)
            highs.append(centre + error)
        return Prediction(compute, self.law(compute), min(lows), max(highs))


def fit_power_law(points: Sequence[Point]) -> ScalingFit:
    sizes = {round(math.log(point.compute), 6) for point in points}
    if len(points) < MIN_POINTS or len(sizes) < MIN_SIZES:
        raise UsageError(
            f"a scaling law needs at least {MIN_POINTS} runs of {MIN_SIZES} sizes, and there are {len(points)} of "
            f"{len(sizes)}: add sizes or seeds"
        )
    compute, loss = (np.array([getattr(point, name) for point in points]) for name in ("compute", "loss"))
    floors = np.linspace(0.0, 0.98 * loss.min(), FLOORS)
    fitted = [_fit_with_floor(compute, loss, floor) for floor in floors]
    possible = [one for one in fitted if one is not None and 0 < one.law.exponent <= MAX_EXPONENT]
    if not possible:
        raise UsageError("the loss does not fall with compute: check that every run trained to its end")
    best = min(possible, key=lambda one: one.sum_of_squares)
    freedom = len(points) - PARAMETERS
    variance = max(best.sum_of_squares / freedom, RESOLUTION**2)
    quantile = t_quantile(freedom)
    plausible = [one for one in possible if one.sum_of_squares - best.sum_of_squares <= variance * quantile**2]
    return ScalingFit(best.law, math.sqrt(variance), list(points), plausible, quantile)


def _fit_with_floor(compute: Array, loss: Array, floor: float) -> _Candidate | None:
    above = loss - floor
    design = np.stack([above, -above * np.log(compute)], axis=1)  # weighted by the derivative of L
    try:
        inverse = np.asarray(np.linalg.inv(design.T @ design), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None
    log_scale, exponent = inverse @ design.T @ (above * np.log(above))
    law = PowerLaw(float(floor), math.exp(min(700.0, log_scale)), float(exponent))
    residuals = loss - np.array([law(value) for value in compute])
    return _Candidate(law, float(residuals @ residuals), inverse)
