"""Optimizers and their parameter groups."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero2all.base.errors import Z2aError, need
from zero2all.base.torch_private import dtensor_like
from zero2all.base.units import show_bytes
from zero2all.model.cost.model_size import updated_by_muon
from zero2all.optim.adafactor import Adafactor
from zero2all.optim.adamw_bf16 import AdamWBF16, Rounding, noise_key
from zero2all.optim.muon import Muon
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import OptimizerRecipe

GroupBuilder = Callable[..., list[dict[str, Any]]]
MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = dict[Tensor, dict[str, Tensor]]


def one_group(parameters: Sequence[Tensor], **settings: Any) -> list[dict[str, Any]]:
    return [{"params": parameters, **settings}] if parameters else []


MUON_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_optimizers(
    model: nn.Module,
    recipe: OptimizerRecipe,
    build_groups: GroupBuilder = one_group,
    mup_width_mult: float = 1.0,
    replicas: dist.ProcessGroup | None = None,
    *,
    seed: int = 0,
    compile: bool = False,
) -> list[Optimizer]:
    """One optimizer for all, or Muon for the matrices inside the blocks and AdamW for the rest (``updated_by_muon``).

    Weight decay applies to matrices only; on a norm's scale or a bias it would hurt. ``build_groups`` makes groups of
    parameters with the same settings: a parallel layout may need several. ``mup_width_mult`` (see ``ModelConfig``)
    scales the learning rate of every matrix but the embedding, for muP; Muon's updates fit any width as they are.
    ``replicas`` are the ranks of DDP, over which Muon divides its work. ``seed`` and ``compile`` are for
    ``AdamWBF16``.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    in_blocks = [parameter for name, parameter in named if updated_by_muon(name, parameter.dim())]
    by_muon = {id(parameter) for parameter in in_blocks} if recipe.name == "muon" else set()
    rest = [(name, parameter) for name, parameter in named if id(parameter) not in by_muon]
    embedding = [p for name, p in rest if "embed_tokens" in name]
    matrices = [p for name, p in rest if p.dim() >= 2 and "embed_tokens" not in name]
    vectors = [p for _, p in rest if p.dim() < 2]
    groups = [
        *build_groups(embedding, decays=True, rate=1.0),
        *build_groups(matrices, decays=True, rate=mup_width_mult),
        *build_groups(vectors, decays=False, rate=1.0),
    ]
    optimizers: list[Optimizer] = []
    if recipe.has_bf16_weights:
        noise_keys: dict[Tensor, int] = {parameter: noise_key(seed, name) for name, parameter in named}
        rounding: Rounding = "kahan" if recipe.name == "adamw-bf16-kahan" else "stochastic"
        optimizers.append(AdamWBF16(groups, noise_keys, rounding, compile=compile))
    elif groups:  # all adapters (LoRA) are matrices inside the blocks: Muon leaves nothing for AdamW
        optimizers.append(_build(recipe.name, groups))
    if by_muon:
        muon_groups = build_groups(in_blocks, decays=True, rate=1.0)
        optimizers.append(Muon(muon_groups, dtype=MUON_DTYPES[recipe.muon_dtype], replicas=replicas))
    apply_settings(optimizers, recipe)
    return optimizers


def _build(name: str, groups: list[dict[str, Any]]) -> Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1.0)
    if name == "lion":
        return Lion(groups)
    if name == "adafactor":
        return Adafactor(groups)
    if name == "adamw-8bit":
        low_bit: Optimizer = need("torchao.optim", "quant").AdamW8bit(groups)
        return low_bit
    return torch.optim.AdamW(groups, fused=True)


def apply_settings(optimizers: list[Optimizer], recipe: OptimizerRecipe) -> None:
    """Put the recipe's settings into every group: loading a checkpoint restores those it was saved with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = recipe.weight_decay if group["decays"] else 0.0
            for name in ("betas", "eps", "momentum"):
                if name in optimizer.defaults:
                    group[name] = getattr(recipe, name)


def set_learning_rate(optimizers: list[Optimizer], recipe: OptimizerRecipe, lr_multiplier: float) -> None:
    """Set every group to the same fraction of its own peak."""
    for optimizer in optimizers:
        peak = recipe.peak_muon_lr if isinstance(optimizer, Muon) else recipe.peak_lr
        for group in optimizer.param_groups:
            lr = peak * lr_multiplier * group["rate"]
            # Low-bit optimizers keep the learning rate in a tensor, so that a change does not recompile.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class Lion(Optimizer):
    """The sign of an interpolated momentum (https://arxiv.org/abs/2302.06675): half of Adam's memory."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                direction = momentum.lerp(parameter.grad, 1 - fast).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - slow)


def map_optimizer_state(optimizers: list[Optimizer], directory: Path) -> None:
    """Give AdamW its state before the first step, with a file under ``directory`` for each moment of each parameter.

    The files have no name once they are mapped: the system deletes them when the process ends, in whatever way.
    """
    for optimizer in optimizers:
        moments: Moments = {
            parameter: {name: _zeros_in_file(parameter, directory) for name in MOMENTS}
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for parameter, tensors in moments.items():
            optimizer.state[parameter] = {"step": torch.zeros(()), **tensors}
        optimizer.register_load_state_dict_post_hook(partial(_copy_into_files, moments))


def _zeros_in_file(parameter: Tensor, directory: Path) -> Tensor:
    """Zeros like the local shard of a parameter."""
    shard = to_local(parameter)
    if shard.numel() == 0:
        return torch.zeros_like(parameter)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="z2a-optimizer-") as file:
            if hasattr(os, "posix_fallocate"):  # fails here if the disk is full, not by a SIGBUS later
                os.posix_fallocate(file.fileno(), 0, shard.nbytes)
            zeros = torch.from_file(file.name, shared=True, size=shard.numel(), dtype=shard.dtype).view_as(shard)
    except OSError as error:
        raise Z2aError(
            f"no file of {show_bytes(shard.nbytes)} for the optimizer state in {directory} "
            f"({error.strerror or error}): free space there, or change parallel.offload"
        ) from error
    return dtensor_like(parameter, zeros) if isinstance(parameter, DTensor) else zeros


def _copy_into_files(moments: Moments, optimizer: Optimizer) -> None:
    """After a load, which may have put tensors in memory in the place of those in files."""
    for parameter, tensors in moments.items():
        state = optimizer.state[parameter]
        for name, mapped in tensors.items():
            if state[name] is not mapped:
                to_local(mapped).copy_(to_local(state[name]))
                state[name] = mapped
