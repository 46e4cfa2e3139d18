"""Ranks as processes: what each yields comes at once, and a failure loses nothing that came before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero2all.base.errors import Z2aError
from zero2all.bench.rank_harness import RankCrashError, run_ranks, stream_jobs, stream_ranks


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


def sum_of(tensors: list[torch.Tensor]) -> float:
    return float(sum(tensors).sum())


def test_arguments_may_hold_many_tensors() -> None:
    """multiprocessing sends a tensor as a file descriptor, and a fork server takes 253 of them."""
    assert run_ranks(2, sum_of, [torch.ones(2)] + [torch.ones(2) for _ in range(299)]) == [600.0, 600.0]


def squares_with_crashes(numbers: list[int], crashes: str) -> Iterator[int]:
    """Squares; while ``crashes`` has lines left, rank 1 takes one of them and crashes at 3 instead."""
    for number in numbers:
        dist.barrier()
        lines = Path(crashes).read_text().splitlines()
        if number == 3 and lines:
            dist.barrier()  # both have read the file
            if dist.get_rank() == 1:
                Path(crashes).write_text("\n".join(lines[1:]))
                os._exit(3)
        yield number * number


def test_after_a_crash_only_the_jobs_without_a_value_are_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crashes = tmp_path / "crashes"
    crashes.write_text("first")
    values = list(stream_jobs(2, squares_with_crashes, [1, 2, 3, 4], str(crashes), seconds=120, detail=False))
    assert values == [[1, 1], [4, 4], [9, 9], [16, 16]]
    assert "new processes repeat 2 of 4 runs" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_a_second_crash_is_an_error(tmp_path: Path) -> None:
    crashes = tmp_path / "crashes"
    crashes.write_text("first\nsecond")
    with pytest.raises(RankCrashError, match="died without an error message"):
        list(stream_jobs(2, squares_with_crashes, [3], str(crashes), seconds=120, detail=False))
