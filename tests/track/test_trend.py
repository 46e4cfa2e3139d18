from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from zero2all.track.eval_record import MAX_EXACT, holm, mann_kendall


def kendall_score(values: tuple[float, ...]) -> int:
    return sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize("values", [(1, 2, 3, 4, 5, 6), (1, 3, 2, 4, 6, 5), (6, 5, 4, 3, 2, 1), (2, 1, 4, 3, 6, 5)])
def test_the_p_value_is_the_share_of_orders_that_rise_as_much(values: tuple[int, ...]) -> None:
    found = mann_kendall(values)
    orders = [kendall_score(order) for order in itertools.permutations(values)]
    assert found is not None
    assert found.p == pytest.approx(sum(score >= kendall_score(values) for score in orders) / len(orders))
    assert found.tau == pytest.approx(kendall_score(values) / 15)


def test_the_approximation_continues_the_exact_test() -> None:
    rng = np.random.default_rng(0)
    for strength in (0.0, 0.01, 0.03):
        values = strength * np.arange(MAX_EXACT) + rng.normal(size=MAX_EXACT)
        exact = mann_kendall(values.tolist())
        tied = mann_kendall([*values[:-1].tolist(), float(values[-2])])  # equal values need the approximation
        assert exact is not None
        assert tied is not None
        assert tied.p == pytest.approx(exact.p, abs=0.02)


def test_equal_values_have_no_trend() -> None:
    flat = mann_kendall([0.5] * 10)
    assert flat is not None
    assert (flat.tau, flat.p) == (0.0, 0.5)
    assert mann_kendall([1.0, 2.0]) is None


def test_false_positives_are_as_rare_as_the_p_value_says() -> None:
    rng = np.random.default_rng(1)
    for size in (8, 80):
        p_values = [mann_kendall(rng.normal(size=size).tolist()) for _ in range(2000)]
        share = np.mean([found is not None and found.p <= 0.05 for found in p_values])
        assert 0.02 < share < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)  # few values have few possible p-values


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
