"""A bit flip in one replica is detected before it is saved, and costs only the steps since the last state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint.state_dict import describe_mismatch
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.train import train

NAME = "layers.1.mlp.up_proj.weight"


def train_with_bit_flip(recipe: Recipe, on_rank: int, at: int) -> str:
    """Train, and flip the lowest bit of one weight, after a step on one rank."""
    steps, original = [0], ParallelModel.update_expert_bias

    def update_and_flip(self: ParallelModel) -> None:
        original(self)
        if steps[0] == at and self.mesh.rank == on_rank:
            dict(self.model.named_parameters())[NAME].data.view(torch.int32)[3, 5] ^= 1
        steps[0] += 1

    ParallelModel.update_expert_bias = update_and_flip  # type: ignore[method-assign]
    try:
        train(recipe)
    except Z2aError as error:
        return str(error)
    return ""


def resume(recipe: Recipe) -> int:
    return int(train(recipe).resumed_at)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_is_named_and_not_saved(ranks: int, workspace: Path, tmp_path: Path) -> None:
    options = ["checkpoint.flash_every=3 steps", "checkpoint.every=100 steps", f"parallel.dp_replicate={ranks}"]
    recipes = [
        tiny_recipe(workspace, f"out={tmp_path}/{name}", f"checkpoint.flash_dir={tmp_path}/memory", *options)
        for name in ("uninterrupted", "flipped")
    ]
    run_ranks(ranks, resume, recipes[0])
    messages = run_ranks(ranks, train_with_bit_flip, recipes[1], 1, 6)
    expected = "on rank 1, unlike on the 2 others" if ranks == 3 else "on ranks 0 and 1, and no majority"
    for message in messages:
        assert f"copies of the model differ: model.{NAME}" in message
        assert expected in message
    assert run_ranks(ranks, resume, recipes[1]) == [6] * ranks
    assert losses(tmp_path / "flipped") == losses(tmp_path / "uninterrupted")


def test_the_outlier_rank_is_named() -> None:
    assert "x differs on rank 6, unlike on the 3 others" in describe_mismatch("x", 1, [5, 5, 5, 4], [0, 2, 4, 6])
    assert "x (and 2 other tensors)" in describe_mismatch("x", 3, [5, 5, 5, 4], [0, 2, 4, 6])
    assert "on ranks 0 and 2, and no majority" in describe_mismatch("x", 1, [5, 4], [0, 2])
    assert "on ranks 0 and 1 and 2 and 3, and no majority" in describe_mismatch("x", 1, [5, 4, 5, 4], [0, 1, 2, 3])
