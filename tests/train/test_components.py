"""What happens around a step, and when: the events of ``train.components`` and the order of the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError, Z2aError
from zero2all.parallel import ParallelModel
from zero2all.track.record_lines import HistogramLine
from zero2all.track.run_record import read_record_lines
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.components import Checkpointing
from zero2all.train.data_loader import Batch, DataLoader
from zero2all.train.throughput import ThroughputMeter


def test_a_state_in_memory_that_was_due_before_a_seek_is_not_saved_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step was never trained to the end here. On a GPU a later one would have been saved under the wrong step."""
    saved: list[int] = []
    islands = SimpleNamespace(has_outstanding_exchange=True)
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(checkpoint=SimpleNamespace(every=500, flash_every=55)),
        plan=SimpleNamespace(is_due=lambda every, done: done % every == 0),
        islands=islands,
        checkpoints=SimpleNamespace(save=lambda done, state, durable: saved.append(done)),
    )
    monkeypatch.setattr(Checkpointing, "_state", lambda self, done: None)
    timer: Any = SimpleNamespace(paused=nullcontext)
    checkpointing = Checkpointing(job, SimpleNamespace(), timer)  # type: ignore[arg-type]
    checkpointing.save(55)
    assert saved == [], "it waits for the outstanding exchange"
    islands.has_outstanding_exchange = False  # this island was behind, and continues at the step of the others
    checkpointing.after_seek()
    assert not checkpointing.needs_weights(111)
    checkpointing.save(111)
    assert saved == []
    checkpointing.save(165)
    assert saved == [165]


def test_errors_of_the_plan_come_before_the_model_is_built(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        pytest.fail("built a model for a run that cannot start")

    monkeypatch.setattr("zero2all.train.setup._build_model", build)
    too_long = ["train.steps=100000", "train.max_epochs=1", "train.mixture={zh: 1, en: 1}"]
    with pytest.raises(UsageError, match="max_epochs=1"):
        train(tiny_recipe(workspace, f"out={tmp_path}", *too_long))


@pytest.mark.parametrize("deferring", ["cpu", "cuda"])
def test_the_record_has_the_layer_norms_of_a_step_that_ends_the_run(
    deferring: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.train.trainer.DEFERRING_DEVICES", (deferring,))
    backwards: list[int] = []

    def poison(model: ParallelModel) -> None:
        backwards.append(len(backwards))
        if len(backwards) == 6:
            next(model.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    with pytest.raises(Z2aError, match="step 5"):
        train(tiny_recipe(workspace, f"out={tmp_path}", "track.layer_norms_every=1"), TrainerHooks(on_gradients=poison))
    lines = read_record_lines(Run.open(tmp_path).record_path)
    assert [line.step for line in lines if isinstance(line, HistogramLine)] == list(range(6))


def test_each_step_has_the_wait_for_its_own_batch(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its metrics are read when the next batch is already here."""
    monkeypatch.setattr("zero2all.train.trainer.DEFERRING_DEVICES", ("cpu",))
    waits: list[tuple[int, float]] = []
    read, update = DataLoader.__iter__, ThroughputMeter.update

    def read_slowly(self: DataLoader) -> Iterator[Batch]:
        for batch in read(self):
            assert 0 < batch.data_wait < 60
            yield replace(batch, data_wait=batch.step / 1000)

    def note(self: ThroughputMeter, step: int, data_wait_seconds: float) -> None:
        waits.append((step, data_wait_seconds))
        update(self, step, data_wait_seconds)

    monkeypatch.setattr(DataLoader, "__iter__", read_slowly)
    monkeypatch.setattr(ThroughputMeter, "update", note)
    train(tiny_recipe(workspace, f"out={tmp_path}"))
    assert waits == [(step, step / 1000) for step in range(12)]
