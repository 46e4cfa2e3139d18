from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.errors import UsageError
from zero2all.tokens.order import BLOCK, SampleOrder, block_quotas, permute

KEYS = np.array([1, 2, 3, 4], dtype=np.uint64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5000), st.integers(0, 2**63))
def test_permutation_hits_every_row_once(size: int, key: int) -> None:
    keys = KEYS ^ np.uint64(key)
    assert sorted(permute(np.arange(size), size, keys)) == list(range(size))


def test_permutations_of_different_keys_differ() -> None:
    first, second = (permute(np.arange(1000), 1000, KEYS ^ np.uint64(key)) for key in (5, 6))
    assert (first == second).mean() < 0.02
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.1


def test_each_epoch_of_each_source_visits_every_row_once_before_any_twice() -> None:
    order = SampleOrder({"a": 1003, "b": 50, "c": 7}, {"a": 0.7, "b": 0.299, "c": 0.001}, seed=3)
    sources, rows = order.locate(0, 3 * BLOCK)
    for number, size in enumerate((1003, 50, 7)):
        mine = rows[sources == number]
        whole = len(mine) // size
        assert whole >= 2
        for epoch in range(whole):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_every_stretch_holds_the_mixture_to_within_about_one_sample() -> None:
    weights = np.array([0.5, 0.3, 0.1999, 0.0001])
    order = SampleOrder(dict.fromkeys("abcd", 10**6), dict(zip("abcd", weights, strict=True)))
    sources, _ = order.locate(BLOCK - 5000, BLOCK + 5000)
    for start in range(0, 9000, 250):
        counts = np.bincount(sources[start : start + 1000], minlength=4)
        assert np.abs(counts - 1000 * order.quotas / BLOCK).max() <= 2.5


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_quotas_fill_the_block_and_leave_nobody_out(weights: list[float]) -> None:
    quotas = block_quotas(np.array(weights))
    assert quotas.sum() == BLOCK
    assert quotas.min() >= 1


@pytest.mark.parametrize("mixture", [None, {"a": 3.0, "b": 1.0}])
def test_slicing_does_not_change_the_sequence(mixture: dict[str, float] | None) -> None:
    order = SampleOrder({"a": 333, "b": 1000}, mixture, seed=9)
    whole = np.stack(order.locate(BLOCK - 100, BLOCK + 156))
    for ranks in (1, 2, 4, 8):
        part = 256 // ranks
        pieces = [
            np.stack(order.locate(BLOCK - 100 + rank * part, BLOCK - 100 + (rank + 1) * part)) for rank in range(ranks)
        ]
        assert (np.concatenate(pieces, axis=1) == whole).all()


def test_seed_stage_and_epoch_change_the_order_and_nothing_else_does() -> None:
    def rows(seed: int = 1, stage: str = "main", start: int = 0) -> list[int]:
        return SampleOrder({"a": 500}, seed=seed, stage=stage).locate(start, start + 500)[1].tolist()

    assert rows() == rows()
    assert rows() != rows(seed=2)
    assert rows() != rows(stage="anneal")
    assert rows() != rows(start=500)


def test_seeking_far_is_as_fast_as_starting() -> None:
    sizes = np.array([10**9, 3 * 10**9])
    order = SampleOrder({"a": sizes[0], "b": sizes[1]}, {"a": 0.5, "b": 0.5})
    order.locate(0, 8)
    start = time.perf_counter()
    sources, rows = order.locate(10**12, 10**12 + 8)
    assert time.perf_counter() - start < 0.25
    assert (rows < sizes[sources]).all()


def test_without_a_mixture_every_row_of_every_source_comes_once_an_epoch() -> None:
    sizes = {"big": 9_000, "empty": 0, "tiny": 3}
    order = SampleOrder(sizes, seed=2)
    for epoch in range(3):
        sources, rows = order.locate(epoch * 9_003, (epoch + 1) * 9_003)
        assert order.names == ["big", "tiny"]
        assert sorted(rows[sources == 0]) == list(range(9_000))
        assert sorted(rows[sources == 1]) == [0, 1, 2]


def test_epochs_are_counted() -> None:
    order = SampleOrder({"a": 100, "b": 300})
    assert order.epochs_at(400) == {"a": 1.0, "b": 1.0}
    assert order.epochs_at(BLOCK + 400)["a"] == pytest.approx((BLOCK + 400) / 400)
    mixed = SampleOrder({"a": 100, "b": 300}, {"a": 0.75, "b": 0.25})
    assert mixed.epochs_at(400) == pytest.approx({"a": 3.0, "b": 1 / 3}, abs=0.01)


def test_a_mixture_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="there are: a"):
        SampleOrder({"a": 5, "b": 0}, {"b": 1.0})
    with pytest.raises(UsageError, match="no source has a full sample"):
        SampleOrder({"a": 0})
