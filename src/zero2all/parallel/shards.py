"""Data parallel with FSDP2: parameters, gradients and optimizer state in shards (https://arxiv.org/abs/2304.11277)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from zero2all.errors import UsageError
from zero2all.parallel.experts import experts_of
from zero2all.recipe import ParallelRecipe


def shard_parameters(
    root: nn.Module,
    blocks: nn.Module,
    mesh: DeviceMesh,
    experts_mesh: DeviceMesh | None,
    recipe: ParallelRecipe,
    dtype: torch.dtype,
) -> None:
    """Each block gathers its weights for itself; the root holds embedding, last norm and head.

    ``mesh`` has one dimension (FSDP) or two, copies first (HSDP). Experts that are shared by ep have a mesh of theirs.
    """
    # Losses leave the model as a view; nobody changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {
        "reshard_after_forward": frees_gathered_weights(recipe),
        # Inputs are not cast: the residual stream stays in fp32 if the model wants it so.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if dtype.itemsize == 2 else None,
            reduce_dtype=torch.float32 if dtype.itemsize == 2 else None,
            cast_forward_inputs=False,
        ),
    }
    for block in blocks.children():
        if experts_mesh is not None:
            _shard_experts(block, experts_mesh, options)
        fully_shard(block, mesh=mesh, **options)
    # The root's weights are needed again at once when backward begins.
    fully_shard(root, mesh=mesh, **{**options, "reshard_after_forward": False})
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # Added up, not averaged: losses are divided by the tokens of the whole batch already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum


def frees_gathered_weights(recipe: ParallelRecipe) -> bool | int:
    """After a block's forward: all of them, none, or all but one in so many."""
    if isinstance(recipe.reshard, int):
        return recipe.reshard
    return recipe.pp == 1 if recipe.reshard == "auto" else recipe.reshard == "always"


def _shard_experts(block: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    shards = mesh.size(mesh.ndim - 1)
    for experts in experts_of(block):
        sizes = [parameter.shape[1] for parameter in experts.parameters()]
        if any(size % shards for size in sizes):
            raise UsageError(
                f"matrices of experts with {' and '.join(map(str, sorted(set(sizes))))} rows do not divide over "
                f"{shards} ranks: change model.moe.expert_intermediate, or raise parallel.ep"
            )
        # Their first dimension is cut by ep.
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1), **options)
