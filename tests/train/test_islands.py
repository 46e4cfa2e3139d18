"""Islands that train: the same weights in the end, exact resume, and what happens when one is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.train.island_runs import island_processes
from zero2all.recipe import Recipe
from zero2all.train import Run

DILOCO = ["parallel.sync.method=diloco", "parallel.sync.islands=2", "parallel.sync.every=4"]


def recipe_of(workspace: Path, out: Path, *options: str) -> Recipe:
    return tiny_recipe(workspace, f"out={out}", *DILOCO, *options)


def weights(out: Path, island: int) -> dict[str, torch.Tensor]:
    return Run.open(out / "run" / f"island-{island}").load_model().state_dict()


@pytest.mark.slow
def test_two_islands_end_with_the_same_weights(workspace: Path, tmp_path: Path) -> None:
    recipe = recipe_of(workspace, tmp_path / "out", "parallel.sync.fragments=2", "parallel.sync.overlap=1")
    with island_processes(tmp_path) as islands:
        for number in range(2):
            islands.start(recipe, number)
        islands.wait()
    one, other = weights(tmp_path / "out", 0), weights(tmp_path / "out", 1)
    assert all(torch.equal(one[name], other[name]) for name in one)
