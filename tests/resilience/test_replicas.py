"""One bit that flips in one copy of the model is found before it is kept, and costs only the steps since then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.resilience.helpers import losses
from zero2all.errors import Z2aError
from zero2all.parallel import Spread
from zero2all.parallel.ranks import run_ranks
from zero2all.recipe import Recipe
from zero2all.resilience.replicas import difference
from zero2all.train import train

NAME = "layers.1.mlp.up_proj.weight"


def flipped(recipe: Recipe, on_rank: int, at: int) -> str:
    """Train, and flip the lowest bit of one weight, or of what the optimizer knows of it, after a step on one rank."""
    steps, original = [0], Spread.even_load

    def even_load(self: Spread) -> None:
        original(self)
        if steps[0] == at and self.layout.rank == on_rank:
            dict(self.model.named_parameters())[NAME].data.view(torch.int32)[3, 5] ^= 1
        steps[0] += 1

    Spread.even_load = even_load  # type: ignore[method-assign]
    try:
        train(recipe)
    except Z2aError as error:
        return str(error)
    return ""


def go_on(recipe: Recipe) -> int:
    return int(train(recipe)["resumed_at"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_is_named_and_not_kept(ranks: int, world: Path, tmp_path: Path) -> None:
    options = ["checkpoint.flash_every=3 steps", "checkpoint.every=100 steps", f"parallel.dp_replicate={ranks}"]
    recipes = [
        tiny_recipe(world, f"out={tmp_path}/{name}", f"checkpoint.flash_dir={tmp_path}/memory", *options)
        for name in ("whole", "flipped")
    ]
    run_ranks(ranks, go_on, recipes[0])
    told = run_ranks(ranks, flipped, recipes[1], 1, 6)
    expected = "on rank 1, unlike on the 2 others" if ranks == 3 else "on ranks 0 and 1, and no majority"
    for message in told:
        assert f"copies of the model differ: model.{NAME}" in message
        assert expected in message
    assert run_ranks(ranks, go_on, recipes[1]) == [6] * ranks
    assert losses(tmp_path / "flipped") == losses(tmp_path / "whole")


def test_the_odd_one_out_is_named() -> None:
    assert "x is another on rank 6, unlike on the 3 others" in difference("x", 1, [5, 5, 5, 4], [0, 2, 4, 6])
    assert "x (and 2 other tensors)" in difference("x", 3, [5, 5, 5, 4], [0, 2, 4, 6])
    assert "on ranks 0 and 2, and no majority" in difference("x", 1, [5, 4], [0, 2])
    assert "on ranks 0 and 1 and 2 and 3, and no majority" in difference("x", 1, [5, 4, 5, 4], [0, 1, 2, 3])
