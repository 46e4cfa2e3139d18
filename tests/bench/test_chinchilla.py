"""The tables of Chinchilla's law are those that were published."""

from __future__ import annotations

import pytest
from benchmarks.chinchilla import CHINCHILLA, compute_optimal_table, over_training_table


def test_chinchilla_says_what_was_published() -> None:
    assert CHINCHILLA(70e9, 1.4e12) == pytest.approx(1.97, abs=0.01)
    optimal, *_, extreme = over_training_table(7e9)
    assert (optimal.compute, optimal.extra_compute) == (1.0, pytest.approx(1.0))
    assert optimal.optimal_parameters == pytest.approx(7e9, rel=1e-6)
    # A model that is trained for 50 times its optimum is as good as a larger one, for more compute than that needs.
    assert (extreme.tokens_per_parameter, extreme.compute) == (1000, 50.0)
    assert extreme.optimal_parameters > 1.5e10
    assert extreme.extra_compute > 2


def test_compute_optimal_models_are_those_of_chinchillas_table() -> None:
    """https://arxiv.org/abs/2203.15556, table 3: FLOPs of 400M, 1B, 10B, 67B, 175B, 280B, 520B and 1T."""
    published = [1.92e19, 1.21e20, 1.23e22, 5.76e23, 3.85e24, 9.90e24, 3.43e25, 1.27e26]
    table = compute_optimal_table()
    assert [row.compute for row in table] == pytest.approx(published, rel=0.1)
    assert [row.loss for row in table] == sorted((row.loss for row in table), reverse=True)
