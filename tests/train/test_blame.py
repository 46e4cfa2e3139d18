from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.errors import Z2aError
from zero2all.train import Run, blame_step, trace_step, train


def test_losses_of_documents_add_up_to_the_loss_of_the_step(world: Path, tmp_path: Path) -> None:
    train(tiny_recipe(world, f"out={tmp_path}", "checkpoint.keep=9"))
    run = Run.open(tmp_path)
    blamed = blame_step(run, 8)
    assert blamed["checkpoint"] == 8
    losses = [part["loss"] for part in blamed["documents"]]
    assert losses == sorted(losses, reverse=True)
    # The weights before step 8 are those of checkpoint 8, so the loss is the one in the record.
    first, last = blamed["samples"]
    batch = torch.from_numpy(run.plan().at(8).samples.tokens(first, last))
    with torch.inference_mode():
        expected = run.load_model(8)(batch[:, :-1], targets_BS=batch[:, 1:]).mean().item()
    assert blamed["loss"] == pytest.approx(expected, abs=1e-4)
    # Each target belongs to one document: weighted by its targets, their losses give the whole again.
    targets = {(part["sample"], part["document"]): part["tokens"] for part in trace_step(run, 8)["documents"]}
    begun: set[int] = set()
    for part in trace_step(run, 8)["documents"]:
        if part["sample"] not in begun:  # the first token of a sample is no target
            begun.add(part["sample"])
            targets[part["sample"], part["document"]] -= 1
    total = sum(part["loss"] * targets[part["sample"], part["document"]] for part in blamed["documents"])
    assert total / batch[:, 1:].numel() == pytest.approx(expected, abs=1e-3)


def test_the_nearest_checkpoint_is_taken_and_none_is_said(world: Path, tmp_path: Path) -> None:
    train(tiny_recipe(world, f"out={tmp_path}", "checkpoint.keep=1"))
    run = Run.open(tmp_path)
    assert blame_step(run, 2)["checkpoint"] == 12
    for step in run.checkpoints.steps():
        for path in sorted(run.checkpoints.path(step).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(Z2aError, match="tokens trace"):
        blame_step(run, 2)
