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

from zero2all.base.errors import Z2aError
from zero2all.base.torch_private import dtensor_like
from zero2all.base.units import show_bytes
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import OptimizerRecipe
from zero2all.recipe.optimizer_plugin import OptimizerParameters

GroupBuilder = Callable[..., list[dict[str, Any]]]
MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = dict[Tensor, dict[str, Tensor]]


def one_group(parameters: Sequence[Tensor], **settings: Any) -> list[dict[str, Any]]:
    return [{"params": parameters, **settings}] if parameters else []


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
    """The optimizers that ``train.optimizer.name`` builds: one, or one for each part of the parameters.

    ``mup_width_mult`` (see ``ModelConfig``) scales the learning rate of every matrix but the embedding, for muP. The
    other arguments are described in ``OptimizerParameters``.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    bound = recipe.bound
    parameters = OptimizerParameters(named, recipe, build_groups, mup_width_mult, replicas, seed, compile)
    with bound.named():
        optimizers: list[Optimizer] = bound().build(parameters)
    for optimizer in optimizers:
        bound.guard(optimizer, "step")
    apply_settings(optimizers, recipe)
    return optimizers


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
    plugin = recipe.plugin
    for optimizer in optimizers:
        peak = plugin.peak_lr(recipe, optimizer)
        for group in optimizer.param_groups:
            lr = peak * lr_multiplier * group["rate"]
            # Low-bit optimizers keep the learning rate in a tensor, so that a change does not recompile.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


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
