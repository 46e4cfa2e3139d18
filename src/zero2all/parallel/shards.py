"""Data parallel with FSDP2: parameters, gradients and optimizer state in shards (https://arxiv.org/abs/2304.11277)."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zero2all.recipe import ParallelRecipe


def apply_sharding(root: nn.Module, blocks: nn.Module, mesh: DeviceMesh, recipe: ParallelRecipe, bf16: bool) -> None:
    """Each block gathers its weights for itself; the root holds embedding, last norm and head.

    ``mesh`` has one dimension (FSDP) or two, copies first (HSDP).
    """
    free: bool | int = {"always": True, "never": False, "auto": recipe.pp == 1}.get(str(recipe.reshard), recipe.reshard)  # type: ignore[arg-type]
    # Inputs are not cast: the residual stream stays in fp32 if the model wants it so.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    # Losses leave the model as a view; nobody changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in blocks.children():
        fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=policy)
    # The root's weights are needed again at once when backward begins.
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    sum_gradients(root)


def sum_gradients(module: nn.Module) -> None:
    """Add gradients up: losses are divided by the tokens of the whole batch already, so a mean would divide twice."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum
