"""A run with PowerSGD that is killed resumes with the same bits: errors of every rank and Q are in its checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import tiny_recipe
from zero2all.bench.rank_harness import run_ranks
from zero2all.errors import Z2aError
from zero2all.recipe import Recipe
from zero2all.track import read_steps
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.data_loader import Batch

STEPS, EVERY = 8, 3


def recipe_for(workspace: Path, out: Path, *overrides: str) -> Recipe:
    return tiny_recipe(
        workspace, f"out={out}", f"train.steps={STEPS}", f"checkpoint.every={EVERY} steps", "train.batch_tokens=256",
        "parallel={dp_replicate: 2, dp_shard: 1, sync: {method: powersgd, powersgd_rank: 2}}", *overrides,
    )  # fmt: skip


def trained(recipe: Recipe, kill_at: int | None = None) -> None:
    checkpoints = Run(recipe, recipe.run_dir).checkpoints

    def kill(batch: Batch) -> None:
        if batch.step == kill_at and dist.get_rank() == 1:
            due, deadline = batch.step // EVERY * EVERY, time.monotonic() + 60
            while not checkpoints.is_valid(due) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe, hooks=TrainerHooks(on_batch=kill))


def losses(recipe: Recipe) -> list[str]:
    return [
        repr((values["loss"], values["grad_norm"])) for values in read_steps(recipe.run_dir / "record.jsonl").values()
    ]


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_bits(workspace: Path, tmp_path: Path) -> None:
    whole, killed = recipe_for(workspace, tmp_path / "whole"), recipe_for(workspace, tmp_path / "killed")
    run_ranks(2, trained, whole, seconds=240)
    with pytest.raises(Z2aError):  # of the rank that is killed, or of the one that waits for it
        run_ranks(2, trained, killed, 5, seconds=240)
    run_ranks(2, trained, killed, seconds=240)
    assert len(losses(whole)) == STEPS
    assert losses(killed) == losses(whole)
    saved = Run.open(killed.run_dir).checkpoints.reader(STEPS).entries()
    names = [name for name in saved if name.startswith("sync.")]
    matrices = [name.removeprefix("sync.q.") for name in names if name.startswith("sync.q.")]
    assert matrices
    assert {f"sync.error-{rank}.{name}" for rank in range(2) for name in matrices} < set(names)
