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
from zero2all.parallel.expert_parallel import expert_modules
from zero2all.recipe import ParallelRecipe


def apply_fsdp(
    root: nn.Module,
    blocks: nn.Module,
    mesh: DeviceMesh,
    expert_fsdp_mesh: DeviceMesh | None,
    recipe: ParallelRecipe,
    dtype: torch.dtype,
) -> None:
    """Each block gathers its weights for itself; the root holds embedding, last norm and head.

    ``mesh`` has one dimension (FSDP) or two, replicas first (HSDP). Experts sharded by ep have their own mesh.
    """
    # Losses leave the model as a view; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward(recipe),
        # Inputs are not cast: the residual stream stays in fp32 if the model asks for it.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if dtype.itemsize == 2 else None,
            reduce_dtype=torch.float32 if dtype.itemsize == 2 else None,
            cast_forward_inputs=False,
        ),
    }
    for block in blocks.children():
        if expert_fsdp_mesh is not None:
            _shard_experts(block, expert_fsdp_mesh, options)
        fully_shard(block, mesh=mesh, **options)
    # The root's weights are needed again at once when backward begins.
    fully_shard(root, mesh=mesh, **{**options, "reshard_after_forward": False})
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # Summed, not averaged: losses are already divided by the tokens of the global batch.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


def reshard_after_forward(recipe: ParallelRecipe) -> bool | int:
    """What FSDP2 gets: free gathered weights after forward, keep them, or reshard to this many ranks."""
    if isinstance(recipe.reshard_after_forward, int):
        return recipe.reshard_after_forward
    return recipe.pp == 1 if recipe.reshard_after_forward == "auto" else recipe.reshard_after_forward == "always"


def _shard_experts(block: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    shards = mesh.size(mesh.ndim - 1)
    for experts in expert_modules(block):
        sizes = [parameter.shape[1] for parameter in experts.parameters()]
        if any(size % shards for size in sizes):
            raise UsageError(
                f"matrices of experts with {' and '.join(map(str, sorted(set(sizes))))} rows do not divide over "
                f"{shards} ranks: change model.moe.moe_intermediate_size, or raise parallel.ep"
            )
        # Their first dimension is sharded by ep.
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1), **options)
