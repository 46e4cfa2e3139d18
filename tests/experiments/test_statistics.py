"""The t-test against a table, and how often it sees a difference where there is none."""

from __future__ import annotations

import random

import pytest

from tests.experiments.helpers import experiment, variant
from zero2all.experiments.report import verdict_text
from zero2all.experiments.statistics import compare_groups, standard_deviation, t_quantile

# Two-sided quantiles from the usual printed table.
TABLE = {
    0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 20: 2.086, 30: 2.042, 120: 1.980},
    0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 7: 3.499, 10: 3.169, 20: 2.845, 30: 2.750, 120: 2.617},
    0.50: {1: 1.000, 2: 0.816, 5: 0.727, 20: 0.687},
}


@pytest.mark.parametrize("confidence", TABLE)
def test_quantiles_are_those_of_the_table(confidence: float) -> None:
    for freedom, expected in TABLE[confidence].items():
        assert t_quantile(freedom, confidence) == pytest.approx(expected, abs=6e-4), freedom


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_two_samples_of_one_distribution_differ_in_five_percent_of_cases(seeds: int) -> None:
    rng = random.Random(seeds)
    found = 0
    for _ in range(1000):
        values = {name: [rng.gauss(1.9, 0.01) for _ in range(seeds)] for name in "ab"}
        found += compare_groups("a", "b", values).is_beyond_noise
    assert 30 <= found <= 70  # three standard deviations around 50


def test_a_difference_of_ten_standard_deviations_is_found() -> None:
    rng = random.Random(7)
    for _ in range(200):
        values = {"a": [rng.gauss(1.9, 0.005) for _ in range(3)], "b": [rng.gauss(1.85, 0.005) for _ in range(3)]}
        verdict = compare_groups("a", "b", values)
        assert verdict.is_beyond_noise
        assert verdict.difference == pytest.approx(-0.05, abs=0.02)


def test_what_is_said() -> None:
    same = compare_groups("a", "b", {"a": [2.0, 2.02], "b": [2.01, 2.0]})
    assert verdict_text(same) == (
        "no difference beyond the noise between seeds: -0.0050 ± 0.0481 bits per byte (b minus a)"
    )
    better = compare_groups("a", "b", {"a": [2.0, 2.002], "b": [1.9, 1.902]})
    assert verdict_text(better) == "b is better than a by 0.1000 ± 0.0061 bits per byte"
    assert verdict_text(compare_groups("b", "a", {"a": [2.0, 2.002], "b": [1.9, 1.902]})) == verdict_text(better)
    unknown = compare_groups("a", "b", {"a": [2.0], "b": [1.9, 1.9]})
    assert verdict_text(unknown) == ("b is better than a by 0.1000 bits per byte; the noise between seeds is unknown")


def test_equal_values_are_no_difference_and_rounding_is_none_either() -> None:
    assert not compare_groups("a", "b", {"a": [2.0, 2.0], "b": [2.0, 2.0]}).is_beyond_noise
    assert not compare_groups("a", "b", {"a": [2.0, 2.0], "b": [2.0001, 2.0]}).is_beyond_noise
    assert standard_deviation([2.0]) is None


def test_a_sweep_compares_with_the_best_and_a_comparison_with_the_first() -> None:
    runs = [variant("a", 1, 2.0), variant("b", 1, 1.9), variant("c", 1, 1.95)]
    assert [(one.reference, one.other) for one in experiment("sweep", *runs).verdicts] == [("b", "c"), ("b", "a")]
    assert [(one.reference, one.other) for one in experiment("compare", *runs).verdicts] == [("a", "b"), ("a", "c")]


def test_other_validation_text_gives_no_verdict() -> None:
    runs = [variant("a", 1, 2.0), variant("b", 1, 1.9, validation_set="other"), variant("c", 1, float("nan"))]
    assert experiment("compare", *runs).verdicts == []
