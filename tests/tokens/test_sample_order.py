from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.base.errors import UsageError
from zero2all.tokens.sample_order import BLOCK_SAMPLES, SampleOrder, block_quotas, feistel_permute

KEYS = np.array([1, 2, 3, 4], dtype=np.uint64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5000), st.integers(0, 2**63))
def test_the_permutation_hits_every_index_once(size: int, key: int) -> None:
    keys = KEYS ^ np.uint64(key)
    assert sorted(feistel_permute(np.arange(size), size, keys)) == list(range(size))


def test_permutations_of_different_keys_differ() -> None:
    first, second = (feistel_permute(np.arange(1000), 1000, KEYS ^ np.uint64(key)) for key in (5, 6))
    assert (first == second).mean() < 0.02
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.1


def test_each_epoch_of_each_source_visits_every_sequence_once_before_any_twice() -> None:
    order = SampleOrder({"a": 1003, "b": 50, "c": 7}, {"a": 0.7, "b": 0.299, "c": 0.001}, seed=3)
    sources, sequences = order.locate(0, 3 * BLOCK_SAMPLES)
    for number, size in enumerate((1003, 50, 7)):
        visited = sequences[sources == number]
        epochs = len(visited) // size
        assert epochs >= 2
        for epoch in range(epochs):
            assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_every_range_holds_the_mixture_to_within_about_one_sample() -> None:
    weights = np.array([0.5, 0.3, 0.1999, 0.0001])
    order = SampleOrder(dict.fromkeys("abcd", 10**6), dict(zip("abcd", weights, strict=True)))
    sources, _ = order.locate(BLOCK_SAMPLES - 5000, BLOCK_SAMPLES + 5000)
    for start in range(0, 9000, 250):
        counts = np.bincount(sources[start : start + 1000], minlength=4)
        assert np.abs(counts - 1000 * order.quotas / BLOCK_SAMPLES).max() <= 2.5


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_quotas_fill_the_block_and_skip_no_source(weights: list[float]) -> None:
    quotas = block_quotas(np.array(weights))
    assert quotas.sum() == BLOCK_SAMPLES
    assert quotas.min() >= 1


@pytest.mark.parametrize("mixture", [None, {"a": 3.0, "b": 1.0}])
def test_the_world_size_does_not_change_the_order(mixture: dict[str, float] | None) -> None:
    order = SampleOrder({"a": 333, "b": 1000}, mixture, seed=9)
    expected = np.stack(order.locate(BLOCK_SAMPLES - 100, BLOCK_SAMPLES + 156))
    for ranks in (1, 2, 4, 8):
        share = 256 // ranks
        shards = [
            np.stack(order.locate(BLOCK_SAMPLES - 100 + rank * share, BLOCK_SAMPLES - 100 + (rank + 1) * share))
            for rank in range(ranks)
        ]
        assert (np.concatenate(shards, axis=1) == expected).all()


def test_seed_stage_and_epoch_change_the_order_and_nothing_else_does() -> None:
    def sequences(seed: int = 1, stage: str = "main", start: int = 0) -> list[int]:
        return SampleOrder({"a": 500}, seed=seed, stage=stage).locate(start, start + 500)[1].tolist()

    assert sequences() == sequences()
    assert sequences() != sequences(seed=2)
    assert sequences() != sequences(stage="anneal")
    assert sequences() != sequences(start=500)


def test_seeking_far_is_as_fast_as_starting() -> None:
    sizes = np.array([10**9, 3 * 10**9])
    order = SampleOrder({"a": sizes[0], "b": sizes[1]}, {"a": 0.5, "b": 0.5})
    order.locate(0, 8)
    start = time.perf_counter()
    sources, sequences = order.locate(10**12, 10**12 + 8)
    assert time.perf_counter() - start < 5, "a walk over the samples before would take hours"
    assert (sequences < sizes[sources]).all()


def test_without_a_mixture_every_sequence_of_every_source_comes_once_an_epoch() -> None:
    sizes = {"big": 9_000, "empty": 0, "tiny": 3}
    order = SampleOrder(sizes, seed=2)
    for epoch in range(3):
        sources, sequences = order.locate(epoch * 9_003, (epoch + 1) * 9_003)
        assert order.names == ["big", "tiny"]
        assert sorted(sequences[sources == 0]) == list(range(9_000))
        assert sorted(sequences[sources == 1]) == [0, 1, 2]


def test_epochs_are_counted() -> None:
    order = SampleOrder({"a": 100, "b": 300})
    assert order.epochs_before(400) == {"a": 1.0, "b": 1.0}
    assert order.epochs_before(BLOCK_SAMPLES + 400)["a"] == pytest.approx((BLOCK_SAMPLES + 400) / 400)
    mixed = SampleOrder({"a": 100, "b": 300}, {"a": 0.75, "b": 0.25})
    assert mixed.epochs_before(400) == pytest.approx({"a": 3.0, "b": 1 / 3}, abs=0.01)


def test_an_impossible_mixture_is_refused() -> None:
    with pytest.raises(UsageError, match="there are: a"):
        SampleOrder({"a": 5, "b": 0}, {"b": 1.0})
    with pytest.raises(UsageError, match="no source has a full sequence"):
        SampleOrder({"a": 0})
