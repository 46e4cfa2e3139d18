"""Ranks as processes: what each yields comes at once, and a failure loses nothing that came before it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from zero2all.bench.rank_harness import stream_ranks
from zero2all.errors import Z2aError


def sums_then(end: str) -> Iterator[int]:
    for number in range(2):
        total = torch.tensor(number + dist.get_rank())
        dist.all_reduce(total)
        yield int(total)
    dist.barrier()  # all have said what they know
    if end == "raise" and dist.get_rank() == 1:
        raise ValueError("no third sum")
    if end == "die" and dist.get_rank() == 1:
        os._exit(3)


def test_values_of_all_ranks_come_together() -> None:
    assert list(stream_ranks(2, sums_then, "end")) == [[1, 1], [3, 3]]


@pytest.mark.parametrize(
    ("end", "message"),
    [("raise", "rank 1 of 2 failed:(?s:.*)no third sum"), ("die", "rank 1 of 2 died without an error message")],
)
def test_values_before_a_failure_are_kept(end: str, message: str) -> None:
    values = stream_ranks(2, sums_then, end)
    assert [next(values), next(values)] == [[1, 1], [3, 3]]
    with pytest.raises(Z2aError, match=message):
        next(values)
