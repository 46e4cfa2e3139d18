"""Every optimizer on several ranks: bytes against the formula, losses and updates against one process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parallel.helpers import full
from tests.parallel.sharded_memory import dry_run
from tests.state_bytes import state_bytes, tensor_bytes
from zero2all.bench.rank_harness import run_ranks
from zero2all.model import ModelInputs
from zero2all.model.cost.model_size import weight_dtype
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.parallel.sharded_init import local_part
from zero2all.recipe import Recipe

CPU = torch.device("cpu")
SAMPLES, LENGTH, STEPS = 8, 16, 3
SHAPE = {"hidden_size": 64, "intermediate_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 320, "max_position_embeddings": 16, "qk_norm": True}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "load_balancing": "bias"}
LOSS_TOLERANCE = 5e-6  # in fp32, as in ``z2a bench parity``
# Both compute in bf16, with gradients in bf16: a rank rounds the gradient of its own samples, 2^-9 of each value.
BF16_LOSS_TOLERANCE = 1e-3
# Codes of 8 bits are 1 to 10% of a moment apart, and blocks of 256 elements begin at other ones in a shard.
LOSS_TOLERANCE_8BIT = 1e-3


@dataclass(frozen=True)
class Case:
    optimizer: dict[str, Any]
    parallel: dict[str, Any] = field(default_factory=dict)
    """None: data parallel over all ranks, with FSDP."""
    moe: bool = False
    loss_tolerance: float = LOSS_TOLERANCE
    update_tolerance: float = 5e-6
    """Of a weight after steps with the same gradients, relative to its change in one process."""

    def recipe(self, parallel: bool = True) -> Recipe:
        bf16 = self.optimizer["name"] in ("adamw-bf16", "adamw-bf16-kahan")
        train = {
            "steps": 1, "seq_len": LENGTH, "batch_tokens": SAMPLES * LENGTH, "precision": "bf16" if bf16 else "fp32",
            "optimizer": {"lr": 3e-3, "muon_lr": 0.01, **self.optimizer},
        }  # fmt: skip
        model = {**SHAPE, "moe": MOE if self.moe else None}
        values = {"model": model, "train": train, "parallel": self.parallel if parallel else {}}
        return Recipe.model_validate({**values, "tokenizer": {"vocab_size": 320}})


@dataclass(frozen=True)
class Result:
    losses: list[float]
    weights: dict[str, Tensor]
    """Full weights after steps with given gradients, of the parameters that this rank has."""
    changes: dict[str, float]
    """Norms of what these steps changed."""
    held: tuple[int, int, int]
    """Bytes of weights, gradients and optimizer state."""


BF16 = {"loss_tolerance": BF16_LOSS_TOLERANCE, "update_tolerance": 0.0}  # the same bits in every layout
KAHAN = {"name": "adamw-bf16-kahan"}
ON_TWO = {
    "adamw": Case({"name": "adamw"}),
    "lion": Case({"name": "lion", "lr": 3e-4}),
    "sgd": Case({"name": "sgd"}),
    "muon": Case({"name": "muon", "muon_dtype": "fp32"}, update_tolerance=1e-4),
    "adafactor": Case({"name": "adafactor"}),
    "adafactor, TP 2": Case({"name": "adafactor"}, {"tp": 2}),
    "adafactor, EP 2": Case({"name": "adafactor"}, {"ep": 2}, moe=True),
    "adafactor, FSDP 2, experts": Case({"name": "adafactor"}, moe=True),
    "stochastic": Case({"name": "adamw-bf16"}, **BF16),
    "kahan": Case(KAHAN, **BF16),
    "stochastic, TP 2": Case({"name": "adamw-bf16"}, {"tp": 2}, **BF16),
    "stochastic, EP 2": Case({"name": "adamw-bf16"}, {"ep": 2}, moe=True, **BF16),
    "stochastic, PP 2": Case({"name": "adamw-bf16"}, {"pp": 2}, **BF16),
    "stochastic, DDP 2": Case({"name": "adamw-bf16"}, {"dp_replicate": 2, "dp_shard": 1}, **BF16),
}
if find_spec("torchao"):
    ON_TWO["adamw-8bit"] = Case({"name": "adamw-8bit"}, {}, False, LOSS_TOLERANCE_8BIT, 0.02)
ON_FOUR = {
    **{name: ON_TWO[name] for name in ("adamw", "lion", "sgd", "muon", "adafactor", "stochastic", "kahan")},
    "adafactor, FSDP 2 x TP 2": Case({"name": "adafactor"}, {"tp": 2}),
    "adafactor, HSDP 2x2": Case({"name": "adafactor"}, {"dp_replicate": 2}),
    "adafactor, EP 2 x FSDP 2": Case({"name": "adafactor"}, {"ep": 2}, moe=True),
    "stochastic, FSDP 2 x TP 2": Case({"name": "adamw-bf16"}, {"tp": 2}, **BF16),
    "kahan, EP 2 x FSDP 2": Case(KAHAN, {"ep": 2}, moe=True, **BF16),
    "kahan, TP 2 x PP 2": Case(KAHAN, {"tp": 2, "pp": 2}, **BF16),
}


def given_gradient(name: str, parameter: Tensor, step: int) -> Tensor:
    """This rank's part of a gradient that depends on the name of a parameter and the step alone."""
    seed = int.from_bytes(hashlib.blake2b(f"{step}/{name}".encode(), digest_size=7).digest())
    whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(parameter.dtype)
    begin, part = local_part(parameter.detach())
    local = whole[tuple(slice(first, first + size) for first, size in zip(begin, part.shape, strict=True))]
    if not isinstance(parameter, DTensor):
        return local
    like = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(local.contiguous(), parameter.device_mesh, parameter.placements, **like)


def train_case(case: Case, ranks: int) -> Result:
    recipe = case.recipe(parallel=ranks > 1)
    options, mesh = recipe.train, ParallelMesh(ParallelDims.from_recipe(recipe.parallel, ranks), CPU)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    stored = weight_dtype(options.optimizer)
    model = ParallelModel(recipe.model, recipe.parallel, mesh, seed=0, dtype=dtype, weight_dtype=stored)
    build = {"replicas": model.ddp_group, "seed": 5}
    optimizers = build_optimizers(model.model, options.optimizer, model.param_groups, **build)
    set_learning_rate(optimizers, options.optimizer, lr_multiplier=1.0)
    named, losses = dict(model.model.named_parameters()), []
    before = {name: full(parameter) for name, parameter in named.items()}
    for step in range(2):
        for name, parameter in named.items():
            parameter.grad = given_gradient(name, parameter, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(parameter) for name, parameter in named.items()}
    changes = {name: float((weight.float() - before[name].float()).norm()) for name, weight in weights.items()}
    first, last = mesh.sample_range(SAMPLES)
    for step in range(STEPS):
        tokens = torch.randint(0, 320, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))[first:last]
        found = model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=SAMPLES * LENGTH)
        losses.append(model.all_reduce_sum(found.sum(dtype=torch.float64)).item() / (SAMPLES * LENGTH))
        model.clip_grad_norm_(1.0)
        gradients = sum(tensor_bytes(parameter.grad) for parameter in named.values())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held = (sum(map(tensor_bytes, named.values())), gradients, state_bytes(optimizers))
    return Result(losses, weights, changes, held)


def train_cases(cases: Sequence[Case], ranks: int) -> list[Result]:
    torch.compile = lambda function, **_: function  # type: ignore[assignment]  # 8-bit AdamW would compile for minutes
    return [train_case(case, ranks) for case in cases]


def check(table: dict[str, Case], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # what ``train_cases`` sets is undone
    on_ranks = run_ranks(ranks, train_cases, list(table.values()), ranks, seconds=400)
    alone_results = train_cases(list(table.values()), 1)
    for number, (name, case) in enumerate(table.items()):
        alone, results = alone_results[number], [rank[number] for rank in on_ranks]
        assert {name for result in results for name in result.weights} == set(alone.weights)
        for result in results:
            assert result.losses == pytest.approx(alone.losses, rel=0, abs=case.loss_tolerance), name
            for parameter, weight in result.weights.items():
                difference = float((weight.float() - alone.weights[parameter].float()).norm())
                assert difference <= case.update_tolerance * alone.changes[parameter], (name, parameter)
        for world, found in ((1, [alone]), (ranks, results)):
            memory = [stage.memory for stage in dry_run(case.recipe(world > 1), world, CPU).stages]
            stated = max(memory, key=lambda one: one.parameters + one.gradients + one.optimizer)
            parts = (stated.parameters, stated.gradients, stated.optimizer)
            most = max((result.held for result in found), key=sum)
            assert most == parts, (name, world)


def test_two_ranks_equal_one_process_and_take_the_stated_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("adafactor", "adafactor, TP 2", "stochastic, EP 2", "kahan")
    check({name: ON_TWO[name] for name in some}, 2, monkeypatch)


@pytest.mark.long
def test_every_optimizer_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    check(ON_TWO, 2, monkeypatch)


@pytest.mark.long
def test_every_optimizer_on_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    check(ON_FOUR, 4, monkeypatch)
