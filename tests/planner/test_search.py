from __future__ import annotations

import time

import pytest

from zero2all.base.machine.gpu_specs import GPUS, find_gpu
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import plan_run
from zero2all.planner.search import cheapest_changes, search_layouts
from zero2all.recipe import Recipe, load_recipe_or_preset, parse_recipe, recipe_yaml
from zero2all.train.hyperparameters import fill_hyperparameters

SIZES = ["train.precision=bf16", "train.batch_tokens=256Ki", "train.micro_batch_tokens=4Ki"]


def test_every_layout_that_is_found_is_a_plan_of_the_recipe_that_fits() -> None:
    cluster = Cluster.of(GPUS["A100"], 16)
    found = search_layouts(load_recipe_or_preset("z2all-1.1b", SIZES), cluster)
    assert found.tried == found.fitting + sum(found.rejected.values())
    assert [one.step for one in found.best] == sorted(one.step for one in found.best)
    for one in found.best[:3]:
        planned = plan_run(load_recipe_or_preset("z2all-1.1b", [*SIZES, *one.overrides]), cluster)
        assert planned.fits
        assert planned.step.expected == pytest.approx(one.step)
        assert planned.memory.total == one.memory
    as_written = plan_run(load_recipe_or_preset("z2all-1.1b", SIZES), cluster)
    assert found.best[0].step <= as_written.step.expected
    assert found.tips


def test_the_best_layout_is_the_best_of_all_that_the_search_could_try() -> None:
    """Pruning leaves out nothing: a plain enumeration of the data-parallel layouts has no faster one."""
    cluster = Cluster.of(GPUS["H100"], 8)
    best = search_layouts(load_recipe_or_preset("z2all-1.1b", SIZES), cluster).best[0].step
    for tp in (1, 2):
        for shard in (1, 2, 4, 8):
            if 8 % (shard * tp):
                continue
            for mode in ("none", "selective", "full"):
                for micro in (2048, 8192):
                    layout = [f"parallel.tp={tp}", f"parallel.dp_shard={shard}", "parallel.dp_replicate=auto"]
                    more = [f"parallel.activation_checkpointing={mode}", f"train.micro_batch_tokens={micro}"]
                    planned = plan_run(load_recipe_or_preset("z2all-1.1b", [*SIZES, *layout, *more]), cluster)
                    assert not planned.fits or planned.step.expected >= best * 0.999999


def test_experts_are_shared() -> None:
    moe = "model.moe={num_experts: 32, num_experts_per_tok: 2, moe_intermediate_size: 2048, load_balancing: bias}"
    found = search_layouts(load_recipe_or_preset("z2all-1.1b", [*SIZES, moe]), Cluster.of(GPUS["A100"], 16))
    assert found.best
    assert any("experts are not sharded by tp" in reason for reason in found.rejected)


def test_changes_of_a_recipe_that_does_not_fit_make_it_fit() -> None:
    recipe = [*SIZES, "train.micro_batch_tokens=64Ki", "parallel.dp_shard=1", "parallel.dp_replicate=auto"]
    cluster = Cluster.of(GPUS["RTX 4090"], 8)
    assert not plan_run(load_recipe_or_preset("z2all-1.1b", recipe), cluster).fits
    changes = cheapest_changes(load_recipe_or_preset("z2all-1.1b", recipe), cluster)
    assert len(changes) == 3
    for change in changes:
        overrides = change.partition(" (")[0].split()
        assert plan_run(load_recipe_or_preset("z2all-1.1b", [*recipe, *overrides]), cluster).fits


@pytest.mark.slow
def test_the_search_for_70b_on_1024_gpus_takes_seconds() -> None:
    """6 CPU seconds alone, twice as many on a core whose other thread is busy."""
    recipe = load_recipe_or_preset("recipes/70b-1024.yaml", ["train.optimizer.lr=1e-4"])
    start = time.process_time()
    found = search_layouts(recipe, Cluster.of(GPUS["H100"], 1024))
    assert time.process_time() - start < 30
    assert found.best[0].mfu > 0.38  # Llama 3 reports 38 to 43% for 405B, https://arxiv.org/abs/2407.21783
    assert all("parallel.tp=16" not in one.overrides for one in found.best)
    layout = plan_run(recipe, Cluster.of(GPUS["H100"], 1024)).layout
    assert layout == plan_run(_with_keys(recipe, found.best[0].overrides), Cluster.of(GPUS["H100"], 1024)).layout


@pytest.mark.long
def test_every_stage_must_fit() -> None:
    """A short stage of long sequences decides: what is best for the largest stage does not fit it."""
    long = "{name: long, tokens: 100000000, seq_len: 131072, batch_tokens: 1048576}"
    words = ["train.epochs=null", "model.max_position_embeddings=131072", "train.batch_tokens=1048576"]
    words.append(f"train.stages=[{{name: main, tokens: 10000000000}}, {long}]")
    recipe = fill_hyperparameters(load_recipe_or_preset("z2all-1.1b", words))
    cluster = Cluster.of(find_gpu("4090"), 8)
    assert not plan_run(recipe, cluster).fits
    for change in cheapest_changes(recipe, cluster):
        keys = change.partition(" (")[0].split()
        assert keys
        assert plan_run(_with_keys(recipe, keys), cluster).fits, change
    for one in search_layouts(recipe, cluster).best:
        planned = plan_run(_with_keys(recipe, one.overrides), cluster)
        assert planned.fits
        assert planned.memory.total == one.memory


def _with_keys(recipe: Recipe, keys: list[str]) -> Recipe:
    return parse_recipe(recipe_yaml(recipe), keys)


@pytest.mark.long
def test_no_layout_is_proposed_that_its_schedule_cannot_run() -> None:
    recipe = fill_hyperparameters(load_recipe_or_preset("z2all-1.1b", ["train.batch_tokens=90112"]))  # 44 samples
    result = search_layouts(recipe, Cluster.of(find_gpu("h100"), 8), keep=10_000)
    assert result.rejected["the schedule cannot run that number of micro-batches"] > 0
    for one in result.best:
        plan_run(_with_keys(recipe, one.overrides), Cluster.of(find_gpu("h100"), 8))
