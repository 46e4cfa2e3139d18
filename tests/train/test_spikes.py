"""What a loss spike costs the ranks that see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero2all.tokens import SamplePart
from zero2all.train.spikes import SAMPLES_READ, Spikes


class Samples:
    """Counts the samples whose documents were looked up: each is a read of two files of a shard."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def documents(self, start: int, stop: int) -> list[SamplePart]:
        self.read += range(start, stop)
        return [SamplePart(sample, f"{sample:04x}", "web", "", "s-0", 0, 0, 9) for sample in range(start, stop)]


def judged(rank: int, batch: tuple[int, int]) -> tuple[Samples, list[dict[str, Any]]]:
    samples, events = Samples(), []
    job: Any = SimpleNamespace(
        guard=SimpleNamespace(look=lambda *_: "loss 9", recipe=SimpleNamespace(policy="warn")),
        spread=SimpleNamespace(scale=None, layout=SimpleNamespace(rank=rank)),
        run=SimpleNamespace(directory="runs/a"),
    )
    stage = SimpleNamespace(samples=samples, first_step=0)
    step: Any = SimpleNamespace(step=7, stage=stage, samples=batch)
    record: Any = SimpleNamespace(event=lambda kind, **values: events.append({"event": kind, **values}))
    assert Spikes(job).judge(step, 9.0, 1.0, record) == "update"
    return samples, events


@pytest.mark.parametrize("rank", [1, 7])
def test_a_spike_is_read_up_by_the_first_rank_alone(rank: int) -> None:
    samples, events = judged(rank, (0, 1024))
    assert samples.read == []
    assert events == []  # every rank sees the same spike, so the first rank's record has it


def test_a_spike_in_a_large_batch_reads_a_bounded_part_of_it() -> None:
    samples, [event] = judged(0, (4096, 8192))
    assert len(samples.read) == SAMPLES_READ
    assert set(samples.read) <= set(range(4096, 8192))
    assert max(samples.read) - min(samples.read) > 4000  # of the whole batch, not its first rows
    assert event["documents"]


def test_a_small_batch_is_named_whole() -> None:
    samples, [event] = judged(0, (8, 16))
    assert samples.read == list(range(8, 16))
    assert {document["gid"] for document in event["documents"]} == {f"{sample:04x}" for sample in range(8, 16)}
