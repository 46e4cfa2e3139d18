from __future__ import annotations

import pytest

from tests.parallel.sharded_memory import dry_run
from zero2all.planner.rank_plan import plan_memory, plan_rank_memory
from zero2all.planner.workload import Layout, Workload, largest_stage
from zero2all.recipe import load_recipe_or_preset

AC_EVERY = "parallel.activation_checkpointing_every=2"
MOE = "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 256, load_balancing: bias}"


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, []),
        (4, ["parallel.dp_shard=1", "parallel.dp_replicate=auto"]),
        (16, ["parallel.dp_replicate=2", "parallel.zero=1"]),
        (4, ["train.optimizer.name=adamw-bf16", "parallel.zero=2"]),
        (2, ["parallel.offload=cpu", "parallel.activation_checkpointing=full", AC_EVERY, "train.compile=false"]),
        (8, ["parallel.tp=4", "parallel.activation_checkpointing=full", "train.optimizer.name=muon"]),
        (8, ["parallel.pp=4", "parallel.schedule=interleaved", "parallel.activation_checkpointing=selective"]),
        (8, ["parallel.pp=2", "parallel.tp=2", "parallel.cp=2"]),
        (4, [MOE, "parallel.ep=2", "model.tie_word_embeddings=true"]),
    ],
    ids=["one rank", "ddp", "zero 1", "bf16, zero 2", "offload", "tp", "interleaved", "pp tp cp", "ep"],
)
def test_the_formula_counts_what_the_sharded_model_holds(world: int, overrides: list[str]) -> None:
    """Each item within 1% of the dry run, which shards the model on the meta device."""
    sizes = ["train.batch_tokens=64Ki", "train.micro_batch_tokens=2Ki", "train.precision=bf16"]
    sizes += ["model.num_hidden_layers=8", "train.seq_len=1024"]
    recipe = load_recipe_or_preset("z2all-300m", [*sizes, *overrides])
    stage = largest_stage(recipe)
    memory = plan_memory(Workload.of(recipe, stage), Layout.of(recipe, stage, world))
    exact = max(
        (summary.memory for summary in dry_run(recipe, world).stages if summary.stage == memory.pp_rank),
        key=lambda one: one.total,
    )
    assert memory.host == pytest.approx(exact.host, rel=0.01, abs=2e6)
    offloads = bool(exact.host)
    for name, size in (
        ("weights (stored)", exact.parameters),
        ("gradients", exact.gradients),
        ("optimizer state", exact.optimizer),
        ("weights in bf16", exact.gathered_weights),
        ("unsharded gradients", exact.unsharded_gradients),
        ("activations", exact.activations),
        ("logits", exact.logits),
    ):
        if offloads and name in ("weights (stored)", "gradients", "optimizer state"):
            continue
        assert memory.bytes_of(name) == pytest.approx(size, rel=0.01, abs=2e6), name


def test_nothing_is_left_out_of_the_sum() -> None:
    recipe = load_recipe_or_preset("z2all-1.1b", ["train.precision=bf16"])
    stage = largest_stage(recipe)
    memory = plan_memory(Workload.of(recipe, stage), Layout.of(recipe, stage, 8))
    assert memory.total == sum(part.bytes for part in memory.parts)
    assert {"CUDA context", "communicators", "fragmentation margin"} <= {part.name for part in memory.parts}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("moe", [[], [MOE.replace("{", "{first_k_dense_replace: 3, ")]], ids=["dense", "moe"])
def test_the_fullest_pipeline_rank_is_found(schedule: str, moe: list[str]) -> None:
    """Stages of 11 layers are uneven: the rank with the most layers is neither the first nor the last."""
    overrides = ["model.num_hidden_layers=11", "parallel.pp=4", f"parallel.schedule={schedule}", *moe]
    overrides += ["train.batch_tokens=128Ki", "train.micro_batch_tokens=1Ki", "train.seq_len=1024"]
    recipe = load_recipe_or_preset("z2all-300m", overrides)
    stage = largest_stage(recipe)
    workload, layout = Workload.of(recipe, stage), Layout.of(recipe, stage, 8)
    everyone = [plan_rank_memory(workload, layout, rank).total for rank in range(4)]
    assert plan_memory(workload, layout).total == max(everyone)
