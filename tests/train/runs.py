"""Runs that are stopped at a step, and what two runs must have in common."""

from __future__ import annotations

import json
import signal
from typing import Any

import torch

from tests.checkpoint.helpers import losses
from zero2all.recipe import Recipe
from zero2all.train import Run, TrainerHooks, train


def ctrl_c_at(step: int) -> TrainerHooks:
    return TrainerHooks(on_batch=lambda batch: signal.raise_signal(signal.SIGINT) if batch.step == step else None)


def trained(recipe: Recipe, hooks: TrainerHooks | None = None, **options: Any) -> Run:
    train(recipe, hooks, **options)
    return Run.open(recipe.run_dir)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.load_model().state_dict()


def assert_same_run(one: Run, other: Run) -> None:
    assert losses(one) == losses(other)
    expected = weights(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, expected[name]), name


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.record_path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.get("event") == kind]


def stored_micro_batch(recipe: Recipe) -> object:
    """What the recipe in the directory of a run says."""
    stored = Run.open(recipe.run_dir).stored_recipe()
    assert stored is not None
    return stored.train.micro_batch_tokens
