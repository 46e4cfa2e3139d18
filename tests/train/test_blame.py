from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.cli.main import app
from zero2all.train import Run, blame_step, trace_step, train


def test_losses_of_documents_add_up_to_the_loss_of_the_step(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}", "checkpoint.keep_latest=9"))
    run = Run.open(tmp_path)
    blamed = blame_step(run, 8)
    assert blamed["checkpoint"] == 8
    losses = [span["loss"] for span in blamed["documents"]]
    assert losses == sorted(losses, reverse=True)
    assert [span["loss"] for span in blame_step(run, 8, lowest=True)["documents"]] == sorted(losses)
    printed = CliRunner().invoke(app, ["blame", str(tmp_path), "--step", "8", "--lowest"]).stdout
    assert printed.splitlines()[1].split()[0] == f"{min(losses):.4f}"
    # The weights before step 8 are those of checkpoint 8, so the loss is the one in the record.
    first, last = blamed["samples"]
    batch = torch.from_numpy(run.plan().stage_of(8).dataset.tokens(first, last))
    with torch.inference_mode():
        expected = run.load_model(8)(batch[:, :-1], targets_BS=batch[:, 1:]).mean().item()
    assert blamed["loss"] == pytest.approx(expected, abs=1e-4)
    # Each target belongs to one document: weighted by their targets, the losses add up to the loss of the step.
    targets = {(span["sample"], span["document"]): span["tokens"] for span in trace_step(run, 8)["documents"]}
    started: set[int] = set()
    for span in trace_step(run, 8)["documents"]:
        if span["sample"] not in started:  # the first token of a sample is not a target
            started.add(span["sample"])
            targets[span["sample"], span["document"]] -= 1
    total = sum(span["loss"] * targets[span["sample"], span["document"]] for span in blamed["documents"])
    assert total / batch[:, 1:].numel() == pytest.approx(expected, abs=1e-3)


def test_the_nearest_checkpoint_is_used_and_a_missing_one_is_reported(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}", "checkpoint.keep_latest=1"))
    run = Run.open(tmp_path)
    assert blame_step(run, 2)["checkpoint"] == 12
    for step in run.checkpoints.steps():
        for path in sorted(run.checkpoints.path(step).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(Z2aError, match="--no-loss"):
        blame_step(run, 2)
