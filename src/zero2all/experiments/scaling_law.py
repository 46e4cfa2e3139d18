"""Loss against training compute: a power law with a floor, its confidence band, and what Chinchilla's law says.

The fit is L(C) = floor + scale * C^-exponent. The floor is profiled: for each candidate the other two are a linear
least-squares fit of log(L - floor), weighted so that residuals count in L. The band covers every floor that the data
does not exclude at 95 %, and the error of the other two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zero2all.errors import UsageError
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
    """The 95 % interval of a single new run."""
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
    """Of log scale and exponent, for residuals of variance 1."""

    def variance(self, compute: float) -> float:
        """Of the predicted mean, for residuals of variance 1."""
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
        """Refused beyond ten times the largest compute that was trained."""
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


@dataclass(frozen=True)
class ParametricLaw:
    """Loss of a model of N parameters after D tokens: E + A / N^a + B / D^b."""

    floor: float
    a_scale: float
    a_exponent: float
    b_scale: float
    b_exponent: float

    def __call__(self, parameters: float, tokens: float) -> float:
        return float(self.floor + self.a_scale * parameters**-self.a_exponent + self.b_scale * tokens**-self.b_exponent)


CHINCHILLA = ParametricLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
"""As refitted to the published data in https://arxiv.org/abs/2404.10102; the first fit of
https://arxiv.org/abs/2203.15556 disagrees with the other two methods of that paper."""
TOKENS_PER_PARAMETER = 20.0


@dataclass(frozen=True)
class OptimalTraining:
    """A model that is trained on as many tokens as are best for its training compute."""

    parameters: float
    tokens: float
    compute: float
    """FLOPs, 6 N D."""
    loss: float


def compute_optimal_table(
    sizes: Sequence[float] = (4e8, 1e9, 1e10, 6.7e10, 1.75e11, 2.8e11, 5.2e11, 1e12),
) -> list[OptimalTraining]:
    """Chinchilla's table 3, with 20 tokens a parameter."""
    rows = []
    for size in sizes:
        tokens = TOKENS_PER_PARAMETER * size
        rows.append(OptimalTraining(size, tokens, 6 * size * tokens, CHINCHILLA(size, tokens)))
    return rows


@dataclass(frozen=True)
class OverTraining:
    """A model that is trained on more tokens than compute-optimal, beside the optimal model of the same loss."""

    tokens_per_parameter: float
    compute: float
    """Relative to the compute-optimal training of the same model."""
    loss: float
    optimal_parameters: float
    """Of the compute-optimal model with that loss: what inference saves."""
    extra_compute: float
    """Training compute relative to that model."""


def over_training_table(
    parameters: float, ratios: Sequence[float] = (20, 50, 100, 200, 500, 1000)
) -> list[OverTraining]:
    """Chinchilla's law for one model and several numbers of tokens. Compute is 6 N D."""
    rows = []
    for ratio in ratios:
        loss = CHINCHILLA(parameters, ratio * parameters)
        optimal = _optimal_parameters(loss)
        extra = ratio * parameters**2 / (TOKENS_PER_PARAMETER * optimal**2)
        rows.append(OverTraining(ratio, ratio / TOKENS_PER_PARAMETER, loss, optimal, extra))
    return rows


def _optimal_parameters(loss: float) -> float:
    """Of the model that reaches a loss with 20 tokens a parameter."""
    low, high = math.log(1e3), math.log(1e16)
    for _ in range(100):
        middle = (low + high) / 2
        size = math.exp(middle)
        low, high = (middle, high) if CHINCHILLA(size, TOKENS_PER_PARAMETER * size) > loss else (low, middle)
    return math.exp(high)
