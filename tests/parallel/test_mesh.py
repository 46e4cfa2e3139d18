"""Parallel dimensions, validation rules and the samples of each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.parallel.helpers import small_config
from zero2all.base.errors import RecipeError, UsageError
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.parallel import mesh as mesh_module
from zero2all.parallel.pipeline_parallel import layer_costs, split_layers, stage_indices_of_rank
from zero2all.parallel.tensor_parallel import enable_async_tp
from zero2all.recipe import ParallelRecipe, parse_recipe

BASE = """
model: {hidden_size: 64, intermediate_size: 128,
  num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 64, vocab_size: 8192}
train: {steps: 1, seq_len: 64, batch_tokens: 1024}
"""


@pytest.mark.parametrize(
    ("recipe", "world", "sizes"),
    [
        ({}, 1, ParallelDims()),
        ({}, 8, ParallelDims(dp_shard=8)),
        ({"tp": 2}, 8, ParallelDims(dp_shard=4, tp=2)),
        ({"dp_replicate": 2, "pp": 2}, 8, ParallelDims(pp=2, dp_replicate=2, dp_shard=2)),
        ({"dp_replicate": "auto", "dp_shard": 1}, 4, ParallelDims(dp_replicate=4)),
        ({"cp": 2, "ep": 4}, 4, ParallelDims(dp_shard=2, cp=2, ep=4)),
    ],
)
def test_auto_takes_the_ranks_that_are_left(recipe: dict[str, int], world: int, sizes: ParallelDims) -> None:
    assert ParallelDims.from_recipe(ParallelRecipe(**recipe), world) == sizes
    assert sizes.world_size == world


@pytest.mark.parametrize(
    ("recipe", "world", "message"),
    [
        ({"tp": 2}, 3, "tp 2 = 2 ranks, but there are 3: start 2 with 'z2a launch --nproc-per-node 2'"),
        ({"dp_shard": 2, "tp": 2}, 8, "= 4 ranks, but there are 8"),
        ({"pp": 4}, 1, "pp 4 = 4 ranks, but there are 1"),
        ({"ep": 3}, 4, "parallel.ep .3. must divide dp_shard x cp .4."),
    ],
)
def test_dims_that_do_not_fit_name_the_remedy(recipe: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelDims.from_recipe(ParallelRecipe(**recipe), world)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp=3", "must divide model.num_attention_heads"),
        ("parallel.async_tp=true", "set parallel.tp above 1"),
        ("parallel={tp: 2, sp: false, async_tp: true}", "parallel.sp=true"),
        ("parallel={pp: 4, schedule: zbv}", "set parallel.schedule=1f1b"),
        ("parallel={pp: 2, schedule: zbv, reshard_after_forward: always}", "set parallel.reshard_after_forward=auto"),
        (
            "parallel={pp: 2, schedule: zero-bubble, reshard_after_forward: 2}",
            "set parallel.reshard_after_forward=auto",
        ),
        ("parallel={pp: 2, schedule: zbv, activation_checkpointing: selective}", "activation_checkpointing=full"),
        ("parallel={cp: 8, cp_attention: ulysses}", "set parallel.cp_attention=allgather"),
        ("parallel.ep=2", "the model has no experts"),
        ("parallel={pp: 2, schedule: zbv, activation_checkpointing: budget}", "cannot split a compiled backward"),
    ],
)
def test_layouts_that_cannot_be_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(BASE, [override])


def test_the_length_of_every_stage_must_fit() -> None:
    stages = "train.stages=[{name: a, steps: 1}, {name: b, steps: 1, seq_len: 12, batch_tokens: 12}]"
    with pytest.raises(RecipeError, match=r"seq_len .12. must be a multiple of 2 x parallel.cp .8."):
        parse_recipe(BASE, ["parallel.cp=4", "train.steps=null", stages])


def test_a_vocabulary_that_tp_does_not_divide_is_refused_though_the_recipe_does_not_know_it() -> None:
    config = small_config(
        hidden_size=48, intermediate_size=96, num_attention_heads=6, num_key_value_heads=3, vocab_size=320
    )
    mesh = cast(ParallelMesh, SimpleNamespace(dims=ParallelDims(tp=3)))
    with pytest.raises(UsageError, match=r"parallel.tp .3. must divide the 320 rows"):
        ParallelModel(config, ParallelRecipe(tp=3), mesh, seed=0)


def test_all_problems_of_a_layout_are_reported_at_once() -> None:
    overrides = ["parallel={pp: 2, tp: 2, schedule: zbv}", "model.tie_word_embeddings=true", "train.compile=true"]
    moe = "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}"
    with pytest.raises(RecipeError) as error:
        parse_recipe(BASE, [*overrides, moe])
    for part in ("model.tie_word_embeddings=false", "train.compile=false", "moe.load_balancing=bias", "parallel.tp=1"):
        assert part in str(error.value)


def test_the_split_counts_the_head() -> None:
    config = small_config(hidden_size=64, intermediate_size=128, num_hidden_layers=8, vocab_size=4096)
    costs = layer_costs(config)
    split = split_layers(costs, 2)
    assert [number for part in split for number in part] == list(range(8))
    most_expensive = max(sum(costs[number] for number in part) for part in split)
    every = [max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, 8)]
    assert most_expensive == min(every)
    assert len(split[0]) > len(split[1]), "the head weighs as much as several layers"


def test_each_stage_is_on_one_rank() -> None:
    for schedule in ("1f1b", "interleaved", "zero-bubble", "zbv"):
        recipe = ParallelRecipe(pp=4, schedule=schedule)
        held = [number for rank in range(4) for number in stage_indices_of_rank(recipe, rank)]
        assert sorted(held) == list(range(4 * recipe.stages_per_rank))
    assert stage_indices_of_rank(ParallelRecipe(pp=4, schedule="zbv"), 0) == [0, 7]


@pytest.mark.parametrize(("device", "bound"), [("cuda:1", "cuda:1"), ("cpu", None)])
def test_nccl_connects_when_the_group_is_joined(
    device: str, bound: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[dict[str, Any]] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(mesh_module, "tcp_store_from_env", lambda timeout: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **more: joined.append(more))
    monkeypatch.setattr(mesh_module, "init_device_mesh", lambda *args, **more: None)
    ParallelMesh.init_distributed(ParallelRecipe(), torch.device(device))
    assert [more["device_id"] for more in joined] == [None if bound is None else torch.device(bound)]


@pytest.mark.parametrize(
    ("device", "compile", "message"), [("cpu", True, "needs a GPU"), ("cuda:0", False, "train.compile=true")]
)
def test_async_tp_says_what_it_needs(device: str, compile: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        enable_async_tp(cast(DeviceMesh, None), torch.device(device), compile=compile)
