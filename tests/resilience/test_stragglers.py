"""Who holds the others up."""

from __future__ import annotations

from typing import Any

from zero2all.resilience.stragglers import held_up, straggler


def arrivals(late: dict[int, float], count: int = 100) -> dict[int, dict[Any, float]]:
    """Four ranks come to a collective every 0.1 s, some of them late."""
    return {rank: {(0, "all_reduce", n): n * 0.1 + late.get(rank, 0.0) for n in range(count)} for rank in range(4)}


def test_the_rank_that_comes_last_by_far_is_named() -> None:
    found = straggler(arrivals({2: 0.03}))
    assert found is not None
    assert found[0] == 2
    assert 0.25 < found[1] < 0.35


def test_ranks_that_come_together_are_not() -> None:
    assert straggler(arrivals({1: 0.001, 3: 0.002})) is None
    assert straggler(arrivals({2: 0.05}, count=5)) is None, "too few to say"


def test_only_what_all_ranks_have_counts() -> None:
    ragged = arrivals({})
    ragged[0] = {key: when for key, when in ragged[0].items() if key[2] >= 50}
    assert set(held_up(ragged)) == {0, 1, 2, 3}
    assert held_up({0: ragged[0]}) == {}
