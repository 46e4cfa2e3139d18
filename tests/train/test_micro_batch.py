"""``train.micro_batch_tokens: auto``: by the estimate, by trial with back-off, and remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import tiny_recipe
from tests.parallel.helpers import Storages
from tests.ranks import on_ranks
from tests.train.runs import assert_same_run, stored_micro_batch, trained
from zero2all.base.errors import RecipeError, Z2aError
from zero2all.checkpoint import RankGroup
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.mesh import ParallelDims
from zero2all.planner.rank_plan import STORED, MemoryPlan, plan_recipe_memory
from zero2all.recipe import ModelConfig, ParallelRecipe, parse_recipe
from zero2all.train import micro_batch, train
from zero2all.train.estimate import estimate_run
from zero2all.train.hyperparameters import with_hyperparameters
from zero2all.train.micro_batch import back_off, estimate_micro_batch, micro_batch_sizes

AUTO = "train.micro_batch_tokens=auto"
SMALL = """
model: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4,
  max_position_embeddings: 64, vocab_size: 8192}
train: {steps: 1, seq_len: 64, batch_tokens: 1536, micro_batch_tokens: auto, precision: fp32}
"""
CPU = torch.device("cpu")


def sizes(*overrides: str, world: int = 1) -> list[int]:
    recipe = parse_recipe(SMALL, list(overrides))
    return micro_batch_sizes(recipe, ParallelDims.from_recipe(recipe.parallel, world))


def test_sizes_divide_what_a_rank_has_of_the_batch() -> None:
    assert sizes() == [1, 2, 3, 4, 6, 8, 12, 24]
    assert sizes(world=2) == [1, 2, 3, 4, 6, 12]
    in_two_stages = sizes("parallel={pp: 2, dp_shard: 1}", world=2)
    assert in_two_stages == [1, 2, 3, 4, 6], "at least four micro-batches"
    stages = "train.stages=[{name: a, steps: 1}, {name: b, steps: 1, batch_tokens: 512}]"
    assert sizes("train.steps=null", stages) == [1, 2, 4, 8]


def test_the_estimate_takes_the_largest_that_fits() -> None:
    recipe = parse_recipe(SMALL)
    totals = {size: plan_recipe_memory(micro_batch.with_micro_batch(recipe, size), 1, CPU).total for size in sizes()}
    for size, total in totals.items():
        [chosen] = estimate_micro_batch(recipe, 1, int(total / 0.9) + 1, CPU)
        assert chosen.value == size * 64
        assert "memory estimate" in chosen.source
    [least] = estimate_micro_batch(recipe, 1, 1, CPU)
    assert least.value == 64, "the estimate is more than the peak: one sample is tried in any case"
    assert estimate_micro_batch(recipe, 1, None, CPU) == []
    assert estimate_micro_batch(parse_recipe(SMALL, ["train.micro_batch_tokens=128"]), 1, 1, CPU) == []


def fails_above(limit: int, tried: list[int]) -> Callable[[int], None]:
    def run(samples: int) -> None:
        tried.append(samples)
        if samples > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return run


@pytest.mark.parametrize(
    ("limit", "expected"), [(24, [24]), (12, [24, 12]), (5, [24, 12, 6, 3]), (1, [24, 12, 6, 3, 1])], ids=str
)
def test_a_size_that_does_not_fit_is_halved(limit: int, expected: list[int]) -> None:
    tried: list[int] = []
    assert back_off(sizes(), 24, fails_above(limit, tried), RankGroup()) == (expected[-1], len(expected))
    assert tried == expected


def test_a_sample_that_does_not_fit_and_other_errors_are_raised() -> None:
    with pytest.raises(Z2aError, match="activation_checkpointing=full"):
        back_off(sizes(), 4, fails_above(0, []), RankGroup())

    def broken(samples: int) -> None:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        back_off(sizes(), 4, broken, RankGroup())


def test_a_stage_of_another_length_needs_its_own_size() -> None:
    stage = "train.stages=[{name: a, steps: 1}, {name: b, steps: 1, seq_len: 32}]"
    with pytest.raises(RecipeError, match="set micro_batch_tokens of"):
        parse_recipe(SMALL, ["train.steps=null", stage])


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"moe": MOE}], ids=["dense", "tied", "experts"])
def test_the_stand_in_keeps_the_activations_of_the_model(mode: Any, changes: dict[str, Any]) -> None:
    shape = {**parse_recipe(SMALL).model.model_dump(), "ops": {}, "vocab_size": 512, **changes}
    config, recipe = ModelConfig.model_validate(shape), ParallelRecipe(activation_checkpointing=mode)
    model = ParallelModel(config, recipe, ParallelMesh(ParallelDims(), CPU), seed=0)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    kept = []
    stand_in = micro_batch.shared_weight_model(model, compile=False)
    for one in (model.model, stand_in):
        with Storages() as storages:
            losses = one(tokens, targets_BS=tokens)
        kept.append(storages.alive(one))
        losses.sum().backward()
    assert kept[1] == pytest.approx(kept[0], rel=0.01)
    weights = [sum(parameter.nbytes for parameter in one.layers.parameters()) for one in (model.model, stand_in)]
    assert weights[1] < 0.7 * weights[0]


TRY = micro_batch.try_micro_batch


def limited(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    """A device with room for ``limit`` samples: a stand-in for a GPU."""
    tried: list[int] = []
    real = TRY

    def run(recipe: Any, model: Any, *, compile: bool, samples: int, rest: int) -> None:
        fails_above(limit, tried)(samples)
        real(recipe, model, compile=compile, samples=samples, rest=rest)

    monkeypatch.setattr(micro_batch, "TRIAL_DEVICES", ("cpu",))
    monkeypatch.setattr(micro_batch, "try_micro_batch", run)
    return tried


def test_the_choice_is_remembered_in_the_run(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("train.steps=4", "checkpoint.every=2 steps")
    recipe = tiny_recipe(workspace, f"out={tmp_path}/auto", AUTO, *options)
    tried = limited(monkeypatch, 2)
    run = trained(recipe)
    assert tried == [8, 4, 2]
    assert "chosen: train.micro_batch_tokens=64 (tried on cpu, trials: 3)" in capsys.readouterr().err
    assert stored_micro_batch(recipe) == 64
    given = tiny_recipe(workspace, f"out={tmp_path}/given", "train.micro_batch_tokens=64", *options)
    assert_same_run(run, trained(given))

    monkeypatch.setattr(micro_batch, "try_micro_batch", lambda *args, **options: pytest.fail("chosen again"))
    train(tiny_recipe(workspace, f"out={tmp_path}/auto", AUTO, *options, "train.steps=6"), extend="constant")
    assert stored_micro_batch(recipe) == 64

    monkeypatch.setattr(micro_batch, "free_device_memory", lambda device, ranks: 1)  # a smaller device
    limited(monkeypatch, 1)
    train(tiny_recipe(workspace, f"out={tmp_path}/auto", AUTO, *options, "train.steps=8"), extend="constant")
    assert "the run had a micro-batch of 2 samples, which does not fit" in capsys.readouterr().err
    assert stored_micro_batch(recipe) == 32


def test_offloaded_weights_are_not_on_the_device_already() -> None:
    def memory(*overrides: str) -> MemoryPlan:
        return plan_recipe_memory(parse_recipe(SMALL, ["train.micro_batch_tokens=64", *overrides]), 2)

    kept, offloaded = memory(), memory("parallel.offload=cpu")
    assert (offloaded.bytes_of(STORED), kept.host) == (0, 0)
    assert offloaded.host > kept.bytes_of(STORED) > 0
    assert 0 < offloaded.peak < kept.peak - kept.bytes_of(STORED)


def test_on_a_cpu_the_estimate_chooses(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", AUTO, "train.steps=1")
    monkeypatch.setattr(micro_batch, "free_device_memory", lambda device, ranks: 2**40)
    train(recipe)
    assert stored_micro_batch(recipe) == 256
    run = estimate_run(tiny_recipe(workspace, f"out={tmp_path}/other", AUTO, "train.steps=1"))
    assert run.estimate.stages[0].batch.samples == 8
    assert "chosen: train.micro_batch_tokens=256" in run.text


def choose_on_ranks(workspace: Path, directory: Path) -> tuple[list[int], Any]:
    patch = pytest.MonkeyPatch()
    tried = limited(patch, 1 if dist.get_rank() == 1 else 100)
    recipe = tiny_recipe(workspace, f"out={directory}", AUTO, "train.steps=2", "parallel.dp_shard=2")
    train(recipe)
    patch.undo()
    return tried, stored_micro_batch(recipe)


def back_off_on_a_rank() -> tuple[list[int], tuple[int, int]]:
    """Only rank 1 runs out of memory."""
    tried: list[int] = []
    return tried, back_off(sizes(), 24, fails_above(5 if dist.get_rank() == 1 else 100, tried), RankGroup())


def test_ranks_agree_where_one_runs_out_of_memory() -> None:
    assert on_ranks(2, back_off_on_a_rank) == [([24, 12, 6, 3], (3, 4))] * 2


@pytest.mark.long
def test_ranks_train_with_what_fits_on_all(workspace: Path, tmp_path: Path) -> None:
    assert on_ranks(2, choose_on_ranks, workspace, tmp_path) == [([4, 2, 1], 32)] * 2


def test_what_is_chosen_is_in_the_recipe() -> None:
    recipe = parse_recipe(SMALL)
    assert recipe.train.resolved_stages()[0].micro_batch_tokens is None, "until it is chosen"
    filled = with_hyperparameters(recipe, estimate_micro_batch(recipe, 1, 2**40, CPU))
    assert filled.train.resolved_stages()[0].micro_batch_tokens == 1536
