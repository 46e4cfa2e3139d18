"""What a loss spike costs the ranks that see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero2all.tokens import DocumentSpan
from zero2all.train import Trainer
from zero2all.train.spike_report import MAX_SAMPLES_READ


class FakeDataset:
    """Records the samples whose documents are looked up: each lookup reads two files of a shard."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def documents(self, start: int, stop: int) -> list[DocumentSpan]:
        self.read += range(start, stop)
        return [DocumentSpan(sample, f"{sample:04x}", "web", "", "s-0", 0, 0, 9) for sample in range(start, stop)]


def handle_spike(rank: int, batch: tuple[int, int]) -> tuple[FakeDataset, list[dict[str, Any]]]:
    dataset, events = FakeDataset(), []
    record: Any = SimpleNamespace(event=lambda kind, **values: events.append({"event": kind, **values}))
    trainer: Any = SimpleNamespace(
        guard=SimpleNamespace(check=lambda *_: "loss 9", recipe=SimpleNamespace(policy="warn")),
        model=SimpleNamespace(loss_scaler=None),
        mesh=SimpleNamespace(rank=rank),
        record=record,
        run=SimpleNamespace(directory="runs/a"),
    )
    stage = SimpleNamespace(dataset=dataset, first_step=0)
    step: Any = SimpleNamespace(step=7, stage=stage, sample_range=batch)
    assert Trainer.check_spike(trainer, step, 9.0, 1.0) == "update"
    return dataset, events


@pytest.mark.parametrize("rank", [1, 7])
def test_only_rank_0_looks_up_the_documents_of_a_spike(rank: int) -> None:
    dataset, events = handle_spike(rank, (0, 1024))
    assert dataset.read == []
    assert events == []  # every rank sees the same spike, so only the record of rank 0 has it


def test_a_spike_in_a_large_batch_reads_a_bounded_sample_of_it() -> None:
    dataset, [event] = handle_spike(0, (4096, 8192))
    assert len(dataset.read) == MAX_SAMPLES_READ
    assert set(dataset.read) <= set(range(4096, 8192))
    assert max(dataset.read) - min(dataset.read) > 4000  # over the full batch, not its first rows
    assert event["documents"]


def test_all_documents_of_a_small_batch_are_named() -> None:
    dataset, [event] = handle_spike(0, (8, 16))
    assert dataset.read == list(range(8, 16))
    assert {document["gid"] for document in event["documents"]} == {f"{sample:04x}" for sample in range(8, 16)}
