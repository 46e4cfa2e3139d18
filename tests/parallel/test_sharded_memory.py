"""Dry runs of parallel layouts."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.parallel.sharded_memory import RankMemory, dry_run
from zero2all.cli.main import app
from zero2all.parallel import ParallelDims
from zero2all.recipe import load_recipe, parse_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = """
model: {hidden_size: 64, intermediate_size: 128,
  num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 64, vocab_size: 8192}
train: {steps: 1, seq_len: 64, batch_tokens: 1024}
"""


MOE = "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32, load_balancing: bias}"


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["parallel={}"], 1),
        (["parallel={}"], 3),  # 3 does not divide the rows
        (["parallel={dp_replicate: 2, tp: 2}"], 16),
        (["parallel={tp: 2, pp: 2, schedule: zbv, cp: 2}"], 16),
        (["parallel={ep: 4, pp: 2}", MOE], 16),
    ],
)
def test_shards_add_up(overrides: list[str], world: int) -> None:
    shown = dry_run(parse_recipe(SMALL, overrides), world)
    held = sum(stage.most for stage in shown.stages) * (world // shown.mesh.pp)
    assert held >= shown.parameters * shown.mesh.dp_replicate


def memory(*overrides: str, world: int = 4) -> RankMemory:
    return dry_run(parse_recipe(SMALL, list(overrides)), world).memory_per_rank


def test_the_gradient_that_accumulation_holds_is_counted() -> None:
    total = dry_run(parse_recipe(SMALL), 1).parameters
    micro, last = "train.micro_batch_tokens=64", "parallel.zero=1"
    every = memory(micro)
    assert every.parameters == every.gradients == total  # 4 bytes over 4 ranks
    assert every.optimizer == 2 * total
    assert every.gradients_between_micro_batches == total
    assert memory(micro, last).unsharded_gradients == every.unsharded_gradients + 4 * total
    assert memory(micro, last).gradients_between_micro_batches == 4 * total
    assert memory(last).gradients_between_micro_batches == 0, "one micro-batch: nothing to accumulate"
    assert memory().gradients_between_micro_batches == 0
    # Copies are not sharded, so nothing is gathered: autocast casts all but embedding and norms.
    copies = memory(micro, "parallel={dp_replicate: 4, dp_shard: 1}")
    assert (copies.gradients, copies.unsharded_gradients) == (4 * total, 0)
    assert 1.0 * total < copies.gathered_weights < 2 * (total - 8192 * 64)


def test_gathered_weights_are_counted_where_they_are_kept() -> None:
    total = dry_run(parse_recipe(SMALL), 1).parameters
    kept = memory("parallel.reshard_after_forward=never")
    assert kept.gathered_weights == 2 * total
    assert memory("parallel.reshard_after_forward=never", "train.precision=fp32").gathered_weights == 4 * total
    embedding, head = 2 * 8192 * 64, 2 * (8192 + 1) * 64  # the head with the last norm
    block = (kept.gathered_weights - embedding - head) // 4
    peak = 2 * (head + block)  # with the buffers of their all-gathers
    assert memory("parallel.reshard_after_forward=always").gathered_weights == peak
    assert memory("parallel.reshard_after_forward=auto").gathered_weights == peak
    freed = kept.gathered_weights - peak
    assert memory("parallel.reshard_after_forward=2").gathered_weights == peak + freed // 2
    # A tied embedding is needed from the first lookup to the last product.
    tied = memory("model.tie_word_embeddings=true")
    assert tied.gathered_weights == head + 3 * block  # a block, and the next one with the buffer of its all-gather
    assert tied.unsharded_gradients == (4 + 2) * head // 2
    # One unit in fp32 is reduced while the gradient of the next is computed.
    assert memory().unsharded_gradients == (4 + 2) * head // 2
    # A pipeline keeps the weights of its stages, cut by tp.
    shown = dry_run(parse_recipe(SMALL, ["parallel={pp: 2, tp: 2}"]), 8)
    for stage in shown.stages:
        cut = stage.memory.gathered_weights
        assert 1.0 * stage.parameters <= cut < 1.01 * stage.parameters  # norms are on both tp ranks
    assert memory("train.optimizer.name=lion").optimizer * 2 == memory().optimizer


def test_the_plan_lists_the_layers_and_shards_of_every_pipeline_rank(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALL)
    layout, world = "parallel={tp: 2, pp: 2}", 8
    words = ["plan", str(tmp_path / "recipe.yaml"), "--gpus", str(world), layout, "--layers"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    counted = dry_run(parse_recipe(SMALL, [layout]), world).stages
    for planned, stage in zip(json.loads(done.stdout)["plan"]["layers"], counted, strict=True):
        assert planned["layers"] == stage.layers
        assert planned["parameters"] == stage.parameters
        assert stage.least <= planned["on_rank"] <= stage.most
    assert "rank 1   layers 3: " in CliRunner().invoke(app, words).stdout, "the head counts as three layers"


@pytest.mark.slow
def test_70b_on_1024_ranks_needs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = "parallel={tp: 8, pp: 4, schedule: interleaved, activation_checkpointing: selective}"
    shown = dry_run(load_recipe(RECIPES / "70b-1024.yaml", [layout]), 1024)
    assert shown.parameters == 70_553_706_496
    assert shown.mesh == ParallelDims(pp=4, dp_shard=32, tp=8)
    # Norms are replicated on the 8 tp ranks; everything else is sharded.
    held = sum(stage.most for stage in shown.stages) * 256
    assert shown.parameters < held < 1.001 * shown.parameters
    # Unsharded: a stage's weights over tp 8, in bf16. Its gradient in fp32 would be twice as much.
    memory = shown.memory_per_rank
    assert memory.gathered_weights == pytest.approx(18.16e9 / 8 * 2, rel=0.01)
    assert memory.unsharded_gradients < 0.25 * memory.gathered_weights
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "in KiB: less than 1 GiB"
