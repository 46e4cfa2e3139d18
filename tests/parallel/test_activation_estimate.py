"""The estimate of activations beside what a forward pass really keeps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.parallel.helpers import CPU, WIDE, build_model, estimated_bytes, forward
from tests.parallel.sharded_memory import RankMemory, dry_run
from zero2all.bench.profile.memory_trace import fake_process_group
from zero2all.model.cost.activations import ActivationPolicy, ActivationShards, activation_bytes, loss_bytes
from zero2all.model.cost.flops import Recompute
from zero2all.parallel.mesh import split_batch
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight
from zero2all.recipe import ParallelRecipe, parse_recipe

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1}
DROPOUT = {"residual_dropout": 0.1}
SMALL = """
model: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4,
  max_position_embeddings: 64, vocab_size: 8192}
train: {steps: 1, seq_len: 64, batch_tokens: 1024}
"""


def kept_bytes(mode: str, layers: int, sizes: dict[str, Any], moe: dict[str, Any] | None = None, **changes: Any) -> int:
    """Bytes that are allocated between forward and backward."""
    with fake_process_group(0, 2) if sizes.get("tp", 1) > 1 else nullcontext():
        return forward(build_model(mode, moe, sizes, **WIDE, num_hidden_layers=layers, **changes))[1]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [({}, {}), ({"moe": MOE}, {}), ({}, {"tp": 2}), ({}, {"tp": 2, "sp": False})],
    ids=["dense", "experts", "tp", "tp without sp"],
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_estimate_is_close_to_what_is_kept(mode: Recompute, changes: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Of two depths, so that what is kept once drops out."""
    policy, shards = ActivationPolicy(mode), ActivationShards(sizes.get("tp", 1), sizes.get("sp", True))
    kept = [kept_bytes(mode, layers, sizes, **changes) for layers in (5, 3)]
    estimates = [estimated_bytes(layers, policy, shards, **changes) for layers in (5, 3)]
    assert estimates[0] - estimates[1] == pytest.approx(kept[0] - kept[1], rel=0.1)


@pytest.mark.parametrize("every", [2, 3])
def test_the_estimate_of_groups_of_blocks(every: int) -> None:
    """Of two depths that differ by one group: its input. Once recomputed, all blocks of a group are there."""
    depths, sizes = (2 * every, every), {"activation_checkpointing_every": every}
    kept = [kept_bytes("full", layers, sizes) for layers in depths]
    estimates = [estimated_bytes(layers, ActivationPolicy("full", every)) for layers in depths]
    assert estimates[0] - estimates[1] == pytest.approx(kept[0] - kept[1], rel=0.05)
    assert estimates[1] == estimated_bytes(every)


def test_the_estimate_of_residual_dropout() -> None:
    """What the masks add, of two depths."""
    added = []
    for measure in (
        lambda layers, **changes: kept_bytes("none", layers, {}, **changes),
        estimated_bytes,
    ):
        masked, plain = ([measure(layers, **changes) for layers in (5, 3)] for changes in (DROPOUT, {}))
        added.append((masked[0] - masked[1]) - (plain[0] - plain[1]))
    assert added[1] == pytest.approx(added[0], rel=0.05)


def memory(*overrides: str, world: int = 1) -> RankMemory:
    return dry_run(parse_recipe(SMALL, list(overrides)), world, CPU).memory_per_rank


def test_activations_of_a_rank_are_those_of_its_micro_batch() -> None:
    config = parse_recipe(SMALL).model
    full = memory("train.precision=fp32")
    assert full.activations == activation_bytes(config, 1024, half=False)
    # logits of a chunk, some of them in fp32 once more, gradients of head and input
    expected = 4 * 1024 * 8192 + 4 * 2**20 + 4 * 64 * 8192 + 4 * 1024 * 64
    assert full.logits == loss_bytes(config, 1024, half=False, device=CPU) == expected
    assert memory("train.precision=fp32", "train.micro_batch_tokens=256").activations == full.activations // 4
    assert memory("train.precision=fp32", world=4).activations == full.activations // 4
    halved = memory("train.precision=fp32", "parallel={cp: 2, cp_attention: ulysses}", world=2)
    assert halved.activations == full.activations // 2
    gathered = memory("train.precision=fp32", "parallel={cp: 2}", world=2)
    assert gathered.activations - halved.activations == 4 * 512 * 4 * 2 * 32  # layers, tokens, fp32, k and v
    longer = "train.stages=[{name: a, steps: 1}, {name: b, steps: 1, batch_tokens: 4096}]"
    assert memory("train.precision=fp32", "train.steps=null", longer).activations == 4 * full.activations
    assert memory("model.ops.cross_entropy=reference").logits == 3 * 4 * 1024 * 8192


def test_a_pipeline_rank_holds_the_micro_batches_in_flight() -> None:
    config = parse_recipe(SMALL).model
    pipeline = "parallel={pp: 2, dp_shard: 1, schedule: %s}"
    micro = ("train.precision=fp32", "train.micro_batch_tokens=64")
    shown = dry_run(parse_recipe(SMALL, [pipeline % "1f1b", *micro]), 2, CPU)
    in_flight = [
        activation_bytes(config, 64, half=False, layers=stage.layers, micro_batches=2 - stage.stage)
        for stage in shown.stages
    ]
    assert [stage.memory.activations for stage in shown.stages] == in_flight
    assert [stage.memory.logits > 0 for stage in shown.stages] == [False, True]
    assert memory(pipeline % "gpipe", *micro, world=2).activations >= 16 * in_flight[0] / 2


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", [16, 16, 16, 16]), ("1f1b", [4, 3, 2, 1]), ("interleaved", [5.5, 4.5, 3.5, 2.5]), ("zbv", [4] * 4)],
)
def test_micro_batches_in_flight(schedule: Any, expected: list[float]) -> None:
    recipe = ParallelRecipe(pp=4, schedule=schedule)
    assert [micro_batches_in_flight(recipe, rank, 16) for rank in range(4)] == expected
    assert max(micro_batches_in_flight(recipe, rank, 2) for rank in range(4)) == 2


def test_a_split_covers_the_batch() -> None:
    for samples in range(1, 40):
        for ranks in (1, 2, 3, 8):
            for micro in (None, 1, 3, 64):
                for stages in (1, 2, 4):
                    split = split_batch(samples, ranks, micro, stages)
                    assert split.micro_batches * split.ranks * split.samples == samples + split.padding
                    assert 0 <= split.padding < ranks * split.samples + ranks
