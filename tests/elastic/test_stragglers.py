"""Which rank delays the others."""

from __future__ import annotations

from typing import Any

from zero2all.elastic.stragglers import find_straggler, wait_share_by_rank


def arrivals(late: dict[int, float], count: int = 100) -> dict[int, dict[Any, float]]:
    """Four ranks enter a collective every 0.1 s, some of them late."""
    return {rank: {(0, "all_reduce", n): n * 0.1 + late.get(rank, 0.0) for n in range(count)} for rank in range(4)}


def test_the_rank_that_arrives_last_by_far_is_named() -> None:
    straggler = find_straggler(arrivals({2: 0.03}))
    assert straggler is not None
    assert straggler[0] == 2
    assert 0.25 < straggler[1] < 0.35


def test_ranks_that_arrive_together_are_not() -> None:
    assert find_straggler(arrivals({1: 0.001, 3: 0.002})) is None
    assert find_straggler(arrivals({2: 0.05}, count=5)) is None, "too few to say"


def test_only_collectives_of_all_ranks_count() -> None:
    ragged = arrivals({})
    ragged[0] = {key: when for key, when in ragged[0].items() if key[2] >= 50}
    assert set(wait_share_by_rank(ragged)) == {0, 1, 2, 3}
    assert wait_share_by_rank({0: ragged[0]}) == {}
