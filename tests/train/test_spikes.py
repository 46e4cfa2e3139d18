"""What a loss spike costs the ranks that see it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.parallel import ParallelModel
from zero2all.tokens import DocumentSpan
from zero2all.train import train
from zero2all.train.job import Progress, TrainerHooks
from zero2all.train.spike_detector import MAX_SAMPLES_READ
from zero2all.train.spike_policy import SpikePolicy


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
    objective = SimpleNamespace(name="pretrain")
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(train=SimpleNamespace(objective=objective)),
        guard=SimpleNamespace(check=lambda *_: "loss 9", recipe=SimpleNamespace(policy="warn")),
        model=SimpleNamespace(loss_scaler=None),
        mesh=SimpleNamespace(rank=rank),
        recorder=SimpleNamespace(record=record),
        run=SimpleNamespace(directory="runs/a"),
    )
    result: Any = SimpleNamespace(loss=9.0, grad_norm=1.0, layer_norms=[])
    stage = SimpleNamespace(dataset=dataset, first_step=0)
    step: Any = SimpleNamespace(step=7, stage=stage, sample_range=batch)
    assert SpikePolicy(job, Progress()).decide(step, result) == "update"
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


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == name]


@pytest.mark.parametrize("factor", [1000.0, math.nan], ids=["spike", "not finite"])
def test_the_event_of_a_spike_has_the_gradient_norm_of_each_layer(
    workspace: Path, tmp_path: Path, factor: float
) -> None:
    """The gradient of layer 1 is wrong at one step: the event shows which layer, before clipping."""
    steps = iter(range(100))

    def spoil(model: ParallelModel) -> None:
        if next(steps) == 40:
            for name, weight in model.model.named_parameters():
                if name.startswith("layers.1.") and weight.grad is not None:
                    weight.grad *= factor

    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=42", "checkpoint.every=100 steps")
    if math.isnan(factor):
        with pytest.raises(Z2aError, match="step 40"):
            train(recipe, TrainerHooks(on_gradients=spoil))
        [event] = events_of(recipe.run_dir, "not finite")
        assert event["layer_norms"][1] is None
        assert event["layer_norms"][0] > 0
    else:
        train(recipe, TrainerHooks(on_gradients=spoil))
        [event] = [one for one in events_of(recipe.run_dir, "spike") if one["step"] == 40]
        first, second = event["layer_norms"]
        assert second > 100 * first > 0
