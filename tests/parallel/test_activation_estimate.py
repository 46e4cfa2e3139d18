"""The estimate of activations beside what a forward pass really keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.sharded_memory import RankMemory, dry_run
from tests.parallel.test_activation_checkpoint import Storages, build_model
from zero2all.base.torch_private import init_fake_process_group
from zero2all.model.cost.activations import ActivationPolicy, ActivationShards, activation_bytes, loss_bytes
from zero2all.model.cost.flops import Recompute
from zero2all.parallel.mesh import split_batch
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight
from zero2all.recipe import ModelConfig, ParallelRecipe, parse_recipe

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 64, "ops": {"cross_entropy": "reference"},
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1}
TOKENS = 256
SMALL = """
model: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4,
  max_position_embeddings: 64, vocab_size: 8192}
train: {steps: 1, seq_len: 64, batch_tokens: 1024}
"""


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """This process as one of several ranks, whose collectives send nothing."""
    init_fake_process_group(0, count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def kept_bytes(mode: str, moe: dict[str, Any] | None, layers: int, sizes: dict[str, Any]) -> int:
    """Bytes that are allocated between forward and backward."""
    with fake_ranks(2) if sizes.get("tp", 1) > 1 else nullcontext():
        parallel_model = build_model(mode, moe, sizes, **SHAPE, num_hidden_layers=layers)
        batch = torch.randint(0, 512, (TOKENS // 64, 65), generator=torch.Generator().manual_seed(0))
        with Storages() as storages:
            losses = parallel_model.model(batch[:, :-1].contiguous(), targets_BS=batch[:, 1:].contiguous())
        kept = storages.alive(but=[*parallel_model.model.parameters(), *parallel_model.model.buffers()])
        del losses
        return kept


@pytest.mark.parametrize(
    ("moe", "sizes"),
    [(None, {}), (MOE, {}), (None, {"tp": 2}), (None, {"tp": 2, "sp": False})],
    ids=["dense", "experts", "tp", "tp without sp"],
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_estimate_is_close_to_what_is_kept(
    mode: Recompute, moe: dict[str, Any] | None, sizes: dict[str, Any]
) -> None:
    """Of two depths, so that what is kept once drops out."""
    shards = ActivationShards(sizes.get("tp", 1), sizes.get("sp", True))
    kept, estimates = (
        [measure(layers) for layers in (5, 3)]
        for measure in (
            lambda layers: kept_bytes(mode, moe, layers, sizes),
            lambda layers: activation_bytes(
                ModelConfig.model_validate({**SHAPE, "moe": moe, "num_hidden_layers": layers}),
                TOKENS, half=False, policy=ActivationPolicy(mode), shards=shards,
            ),
        )
    )  # fmt: skip
    assert estimates[0] - estimates[1] == pytest.approx(kept[0] - kept[1], rel=0.1)


@pytest.mark.parametrize("every", [2, 3])
def test_the_estimate_of_groups_of_blocks(every: int) -> None:
    """Of two depths that differ by one group: its input. Once recomputed, all blocks of a group are there."""
    depths = (2 * every, every)
    sizes = {"activation_checkpointing_every": every}
    kept = [kept_bytes("full", None, layers, sizes) for layers in depths]
    configs = [ModelConfig.model_validate({**SHAPE, "num_hidden_layers": layers}) for layers in depths]
    estimates = [
        activation_bytes(config, TOKENS, half=False, policy=ActivationPolicy("full", every)) for config in configs
    ]
    assert estimates[0] - estimates[1] == pytest.approx(kept[0] - kept[1], rel=0.05)
    one_group = activation_bytes(configs[1], TOKENS, half=False, policy=ActivationPolicy("full", every))
    assert one_group == activation_bytes(configs[1], TOKENS, half=False)


def test_the_estimate_of_residual_dropout() -> None:
    """What the masks add, of two depths."""
    changed = {**SHAPE, "residual_dropout": 0.1}
    kept, estimates = [], []
    for shape in (changed, SHAPE):
        depths = []
        for layers in (5, 3):
            model = build_model("none", None, {}, **shape, num_hidden_layers=layers)
            batch = torch.zeros(TOKENS // 64, 64, dtype=torch.int64)
            with Storages() as storages:
                losses = model.model(batch, targets_BS=batch)
            depths.append(storages.alive(but=[*model.model.parameters(), *model.model.buffers()]))
            del losses
        kept.append(depths[0] - depths[1])
        config = [ModelConfig.model_validate({**shape, "num_hidden_layers": layers}) for layers in (5, 3)]
        estimates.append(
            activation_bytes(config[0], TOKENS, half=False) - activation_bytes(config[1], TOKENS, half=False)
        )
    assert estimates[0] - estimates[1] == pytest.approx(kept[0] - kept[1], rel=0.05)


def memory(*overrides: str, world: int = 1) -> RankMemory:
    return dry_run(parse_recipe(SMALL, list(overrides)), world, torch.device("cpu")).memory_per_rank


def test_activations_of_a_rank_are_those_of_its_micro_batch() -> None:
    config = parse_recipe(SMALL).model
    full = memory("train.precision=fp32")
    assert full.activations == activation_bytes(config, 1024, half=False)
    # logits of a chunk, some of them in fp32 once more, gradients of head and input
    expected = 4 * 1024 * 8192 + 4 * 2**20 + 4 * 64 * 8192 + 4 * 1024 * 64
    assert full.logits == loss_bytes(config, 1024, half=False, device=torch.device("cpu")) == expected
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
    shown = dry_run(parse_recipe(SMALL, [pipeline % "1f1b", *micro]), 2, torch.device("cpu"))
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
