"""The fit of validation to shares: against a known response, against brute force, and on noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zero2all.experiments import mixture_fit
from zero2all.experiments.mixture_fit import best_mixture, effect_interval, fit_response
from zero2all.experiments.mixtures import USEFUL_ERROR
from zero2all.experiments.statistics import rank_correlation

Array = np.ndarray[Any, Any]
TARGET = np.full(3, 1 / 3)
EQUAL = np.full(4, 0.25)


def draw(count: int, rng: np.random.Generator) -> Array:
    """Equal weights and random mixtures of four sources."""
    shares = np.maximum(rng.dirichlet(np.ones(4), size=count - 1), 0.001)
    return np.vstack([EQUAL, shares / shares.sum(axis=1, keepdims=True)])


def respond(shares: Array) -> Array:
    """Bits per byte of three sources: a power law of their tokens and a tenth of their neighbours'. The fourth source
    helps none."""
    useful = shares[:, :3] + 0.1 * np.roll(shares[:, :3], 1, axis=1) + 0.03
    responded: Array = 1.5 + 0.8 * useful**-0.25
    return responded


def measure(count: int, seed: int, noise: float = 0.02) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    shares = draw(count, rng)
    return shares, respond(shares) + noise * rng.standard_normal((count, 3))


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_helps_none_gets_the_smallest_share_of_a_better_mixture(seed: int) -> None:
    shares, values = measure(16, seed)
    fit = fit_response(shares, values, TARGET)
    assert fit.error < 0.7 * fit.mean_error
    best = best_mixture(fit.response, shares, TARGET)
    assert best.sum() == pytest.approx(1)
    assert best[3] < 0.5 * best[:3].min()
    assert respond(best[None]) @ TARGET < respond(EQUAL[None]) @ TARGET - 0.02


def test_effects_are_the_derivatives_of_the_response() -> None:
    shares, values = measure(40, 1, noise=0.002)
    fit = fit_response(shares, values, TARGET)
    moved = EQUAL + 1e-4 * (np.eye(4) - EQUAL) / (1 - EQUAL)[:, None]  # one share rises by 1e-4, the others make room
    assert np.allclose(moved.sum(axis=1), 1)
    expected = (respond(moved) - respond(EQUAL[None])) / 1e-4
    assert fit.response.effects(EQUAL) == pytest.approx(expected, abs=0.15)
    low, high = effect_interval(fit, shares, values, TARGET, EQUAL)
    effects = fit.response.effects(EQUAL) @ TARGET
    assert np.all(low < effects)
    assert np.all(effects < high)
    assert np.all(high[:3] < 0)
    assert low[3] > 0


def test_a_response_of_the_fitted_form_is_recovered() -> None:
    shares = draw(24, np.random.default_rng(2))
    coefficients = np.array([[-0.1, 0.0], [-0.02, -0.08], [0.0, -0.05], [0.01, 0.0]])
    values = 2 + np.log(shares + 0.03) @ coefficients
    fit = fit_response(shares, values, np.array([0.5, 0.5]))
    assert fit.response.offset == 0.03
    assert fit.response.coefficients == pytest.approx(coefficients, abs=1e-4)
    assert fit.error < 1e-3


def test_the_leave_one_out_error_is_that_of_fits_without_each_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_fit, "OFFSETS", (0.1,))
    monkeypatch.setattr(mixture_fit, "RIDGES", (1e-9,))  # so small that the scale of the features does not matter
    shares, values = measure(12, 3)
    fit = fit_response(shares, values, TARGET)
    errors = fit.predicted - values @ TARGET
    closed_form = mixture_fit._leave_one_out_error(fit.response, shares, values, TARGET)
    assert closed_form == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert fit.error == pytest.approx(closed_form**0.5, rel=1e-5)
    means = [(values[np.arange(12) != left_out] @ TARGET).mean() for left_out in range(12)]
    assert fit.mean_error == pytest.approx(np.sqrt(np.mean((values @ TARGET - means) ** 2)))


def test_noise_is_seldom_taken_for_a_response() -> None:
    found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        fit = fit_response(draw(12, rng), rng.standard_normal((12, 3)), TARGET)
        found += fit.error < USEFUL_ERROR * fit.mean_error
    assert found <= 2


def test_suggestions_are_between_the_mixtures_that_were_measured() -> None:
    shares, values = measure(10, 4)
    shares[:, 3] = np.maximum(shares[:, 3], 0.2)
    shares /= shares.sum(axis=1, keepdims=True)
    best = best_mixture(fit_response(shares, values, TARGET).response, shares, TARGET)
    assert np.all(best >= shares.min(axis=0))
    assert np.all(best <= shares.max(axis=0))


def test_values_that_do_not_vary_give_a_flat_response() -> None:
    shares = draw(8, np.random.default_rng(5))
    shares[:] = shares[0]
    fit = fit_response(shares, np.full((8, 3), 2.0), TARGET)
    assert (fit.error, fit.mean_error) == pytest.approx((0, 0))
    assert np.all(np.isfinite(fit.response.effects(shares[0])))


def test_equal_values_share_a_rank() -> None:
    assert rank_correlation([1, 2, 2, 3], [10, 20, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0
