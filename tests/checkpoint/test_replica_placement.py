"""No node holds the only copies of anything, and a bit flip in one replica is detected before it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint.replicas import plan_replicas
from zero2all.checkpoint.state_dict import describe_mismatch
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.train import train

EVEN = [[node for node in range(nodes) for _ in range(each)] for nodes in (2, 3, 5, 128) for each in (1, 2, 8)]
UNEVEN = [[0, 0, 0, 1], [0, 1, 1, 1, 1], [2, 0, 0, 1], [0, 1, 0, 1, 2], [*range(7), 0, 0, 3, 3, 3]]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("nodes", [*EVEN, *UNEVEN], ids=lambda nodes: f"{len(nodes)}-on-{len(set(nodes))}")
def test_the_loss_of_a_node_loses_no_state(nodes: list[int], copies: int) -> None:
    plan = plan_replicas(nodes, copies)
    for rank, holders in enumerate(plan):
        assert len(holders) == min(copies, len(set(nodes)) - 1)
        at = [nodes[holder] for holder in holders]
        assert nodes[rank] not in at, "a replica beside its original is lost with it"
        assert len(set(at)) == len(at), "two replicas on one node"
    for lost in set(nodes):
        for rank, holders in enumerate(plan):
            assert any(nodes[place] != lost for place in (rank, *holders))


@pytest.mark.parametrize("nodes", EVEN, ids=lambda nodes: f"{len(nodes)}-on-{len(set(nodes))}")
def test_every_rank_holds_equally_many(nodes: list[int]) -> None:
    held = [holder for holders in plan_replicas(nodes, 2) for holder in holders]
    assert len({held.count(rank) for rank in range(len(nodes))}) == 1


def test_there_are_no_replicas_on_one_node_and_none_if_turned_off() -> None:
    assert plan_replicas([0, 0, 0], copies=2) == [(), (), ()]
    assert plan_replicas([0, 1], copies=0) == [(), ()]
    assert plan_replicas("AABB", copies=2) == [(2,), (3,), (0,), (1,)]


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
