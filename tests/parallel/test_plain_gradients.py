"""``parallel.gradient_dtype`` as it is by default changes no bit of what torch's DDP and FSDP2 do on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.helpers import make_model
from tests.parallel.test_gradient_accumulation import LENGTH, MICROS, VOCAB, config
from tests.ranks import on_ranks
from zero2all.model import ModelInputs
from zero2all.model.z2all import Z2all
from zero2all.parallel.sharded_init import to_local

pytestmark = pytest.mark.slow
RANKS, STEPS, LR = 2, 3, 0.5
Weights = dict[str, Tensor]
DDP = {"dp_replicate": RANKS, "dp_shard": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": DDP,
    "FSDP": {},
    "DDP, bf16": {**DDP, "gradient_dtype": "bf16"},
    "FSDP, bf16": {"gradient_dtype": "bf16"},
    "FSDP, bf16, auto": {"gradient_dtype": "bf16", "dp_replicate": "auto", "dp_shard": RANKS},
}


def samples_of(rank: int) -> Tensor:
    tokens = torch.randint(0, VOCAB, (MICROS * RANKS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[rank * MICROS : (rank + 1) * MICROS]


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= LR * parameter.grad
            parameter.grad = None


def ours(sizes: dict[str, Any]) -> tuple[Weights, Weights]:
    """Before training and after; parts of this rank."""
    model = make_model(sizes, config(moe=False), seed=3)
    own, begin = samples_of(model.mesh.rank), weights_of(model.model)
    for _ in range(STEPS):
        model.forward_backward(
            ModelInputs(own[:, :-1], own[:, 1:]), divisor=MICROS * RANKS * LENGTH, micro_batch_size=1
        )
        descend(model.model)
    return begin, weights_of(model.model)


def of_torch(kind: str) -> Weights:
    """DDP or FSDP2 as their documentation has it, with the same loss."""
    rank = torch.distributed.get_rank()
    model = Z2all(config(moe=False)).init_weights(seed=3)
    run: nn.Module = model
    if kind == "DDP":
        run = DistributedDataParallel(model)
    else:
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    own = samples_of(rank)
    for _ in range(STEPS):
        for number, sample in enumerate(own.split(1)):
            if isinstance(run, DistributedDataParallel):
                run.require_backward_grad_sync = number == MICROS - 1
            losses = run(ModelInputs(sample[:, :-1].contiguous(), targets_BS=sample[:, 1:].contiguous()))
            (losses.sum() * (RANKS / (MICROS * RANKS * LENGTH))).backward()  # both average over ranks
        descend(model)
    return weights_of(model)


def weights_of(model: nn.Module) -> Weights:
    return {name: to_local(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def everything() -> tuple[dict[str, tuple[Weights, Weights]], dict[str, Weights]]:
    return {name: ours(sizes) for name, sizes in LAYOUTS.items()}, {kind: of_torch(kind) for kind in ("DDP", "FSDP")}


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, tuple[Weights, Weights]], dict[str, Weights]]]:
    return on_ranks(RANKS, everything, detail=False)


def different(one: Weights, other: Weights) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_by_default_training_is_bitwise_that_of_torch(kind: str, found: list[Any]) -> None:
    for trained, plain in found:
        begin, end = trained[kind]
        assert different(begin, end), "nothing was trained"
        assert different(end, plain[kind]) == []


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_bf16_is_not_ignored(kind: str, found: list[Any]) -> None:
    for trained, plain in found:
        end = trained[f"{kind}, bf16"][1]
        assert len(different(end, plain[kind])) > len(end) / 2
        assert all(torch.allclose(end[name], plain[kind][name], atol=0.02) for name in end)


def test_replicas_that_turn_out_to_be_one_are_none(found: list[Any]) -> None:
    """``dp_replicate: auto`` was once taken for HSDP, whose sums of micro-batches stay in fp32."""
    for trained, _ in found:
        assert different(trained["FSDP, bf16, auto"][1], trained["FSDP, bf16"][1]) == []
