"""How validation responds to the mixture: bits per byte as a function of the shares of the sources.

As in RegMix (Liu et al., 2024), small runs with random mixtures are fitted, and the mixture with the best prediction is
searched among many. A dozen runs are too few for gradient-boosted trees, so the response is linear in the logarithms of
the shares: more of a source helps less and less, and the best mixture is not a single source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
OFFSETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # from nearly a power law of the share to nearly a linear function of it
RIDGES = tuple(10.0**power for power in range(-5, 3))
MAX_FOLDS = 100  # beyond, several mixtures are left out at a time
RESAMPLES = 400
SAMPLES = 20_000
BEST_SAMPLES = 100
SEED = 0


@dataclass(frozen=True)
class Response:
    """Outputs by shares: ``intercept + sum of coefficient * log(share + offset)`` over the sources."""

    offset: float
    ridge: float
    intercept: Array
    """[outputs]"""
    coefficients: Array
    """[sources, outputs]"""

    def predict(self, shares: Array) -> Array:
        """[mixtures, sources] to [mixtures, outputs]"""
        predicted: Array = self.intercept + np.log(shares + self.offset) @ self.coefficients
        return predicted

    def effects(self, shares: Array) -> Array:
        """[sources, outputs]: change of the outputs by the share of a source, if the other shares make room in
        proportion. The unit is a share of 1."""
        gradient = self.coefficients / (shares + self.offset)[:, None]
        effects: Array = (gradient - shares @ gradient) / np.maximum(1 - shares, 1e-9)[:, None]
        return effects


@dataclass(frozen=True)
class Fit:
    """A response, and how well it predicts mixtures that were left out."""

    response: Response
    error: float
    """Root mean square of the errors of the target."""
    mean_error: float
    """The same with the mean of the other mixtures as the prediction."""
    predicted: Array
    """Target of each mixture, predicted from the others."""


def fit_response(shares: Array, values: Array, target: Array) -> Fit:
    """``shares`` [mixtures, sources], ``values`` [mixtures, outputs], ``target`` the weights of the outputs.

    Offset and ridge are those with the smallest leave-one-out error. Mixtures that are left out to measure the error
    have no part in that choice.
    """
    count = len(shares)
    predicted, means = np.zeros(count), np.zeros(count)
    for left_out in np.array_split(np.arange(count), min(count, MAX_FOLDS)):
        rest = np.delete(np.arange(count), left_out)
        response = _choose_response(shares[rest], values[rest], target)
        predicted[left_out] = response.predict(shares[left_out]) @ target
        means[left_out] = (values[rest] @ target).mean()
    known = values @ target
    return Fit(
        response=_choose_response(shares, values, target),
        error=float(np.sqrt(np.mean((known - predicted) ** 2))),
        mean_error=float(np.sqrt(np.mean((known - means) ** 2))),
        predicted=predicted,
    )


def effect_interval(fit: Fit, shares: Array, values: Array, target: Array, at: Array) -> tuple[Array, Array]:
    """95% interval of the effect of each source on the target, by Rubin's Bayesian bootstrap over the mixtures.

    Weights in place of resampling: of a dozen mixtures, a resample may lack those that show a source.
    """
    rng = np.random.default_rng(SEED)
    effects = []
    for _ in range(RESAMPLES):
        weights = rng.exponential(size=len(shares))
        response = _fit(shares, values, weights, fit.response.offset, fit.response.ridge)
        effects.append(response.effects(at) @ target)
    low, high = np.quantile(effects, (0.025, 0.975), axis=0)
    return low, high


def best_mixture(response: Response, shares: Array, target: Array) -> Array:
    """Mean of the mixtures with the lowest predicted target, among random ones between those that were measured."""
    rng = np.random.default_rng(SEED)
    corners = rng.integers(len(shares), size=(SAMPLES, shares.shape[1]))
    weights = rng.dirichlet(np.ones(shares.shape[1]), size=SAMPLES)
    between = np.einsum("nc,ncs->ns", weights, shares[corners])
    order = np.argsort(response.predict(between) @ target, kind="stable")
    best: Array = between[order[:BEST_SAMPLES]].mean(axis=0)
    return best


def _choose_response(shares: Array, values: Array, target: Array) -> Response:
    """The response with the smallest leave-one-out error of the target."""
    uniform = np.ones(len(shares))
    candidates = (_fit(shares, values, uniform, offset, ridge) for offset in OFFSETS for ridge in RIDGES)
    return min(candidates, key=lambda response: _leave_one_out_error(response, shares, values, target))


def _fit(shares: Array, values: Array, weights: Array, offset: float, ridge: float) -> Response:
    """Weighted ridge regression on standardized logarithms; the intercept is not penalized."""
    weights = weights / weights.sum()
    features = np.log(shares + offset)
    mean, centre = weights @ features, weights @ values
    scale = _scale(features, mean, weights)
    standard = (features - mean) / scale
    gram = standard.T @ (weights[:, None] * standard) + ridge * np.eye(len(mean))
    slopes = np.linalg.solve(gram, standard.T @ (weights[:, None] * (values - centre)))
    coefficients = slopes / scale[:, None]
    return Response(offset, ridge, centre - mean @ coefficients, coefficients)


def _leave_one_out_error(response: Response, shares: Array, values: Array, target: Array) -> float:
    """Mean squared error of each mixture by a fit to the others, from the diagonal of the hat matrix."""
    count = len(shares)
    features = np.log(shares + response.offset)
    mean = features.mean(axis=0)
    standard = (features - mean) / _scale(features, mean, np.full(count, 1 / count))
    gram = standard.T @ standard / count + response.ridge * np.eye(len(mean))
    leverage = (1 + np.einsum("ns,sn->n", standard, np.linalg.solve(gram, standard.T))) / count
    errors = (values - response.predict(shares)) @ target / np.maximum(1 - leverage, 1e-9)
    return float(np.mean(errors**2))


def _scale(features: Array, mean: Array, weights: Array) -> Array:
    """Standard deviations; 1 for a feature that does not vary."""
    deviation = np.sqrt(weights @ (features - mean) ** 2)
    scale: Array = np.where(deviation > 1e-12, deviation, 1.0)
    return scale
