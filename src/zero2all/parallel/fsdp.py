"""Data parallel with FSDP2: parameters, gradients and optimizer state in shards (https://arxiv.org/abs/2304.11277)."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from zero2all.base.errors import UsageError
from zero2all.model import Z2all
from zero2all.model.blocks import LMHead
from zero2all.model.moe import Router
from zero2all.parallel.expert_parallel import expert_modules
from zero2all.recipe import ParallelRecipe


def apply_fsdp(
    root: nn.Module,
    model: Z2all,
    mesh: DeviceMesh,
    expert_fsdp_mesh: DeviceMesh | None,
    recipe: ParallelRecipe,
    dtype: torch.dtype,
) -> None:
    """Embedding, each block, and last norm with head gather their weights for themselves.

    ``root`` is what a step calls: the model, or a pipeline stage around it. ``mesh`` has one dimension (FSDP) or two,
    replicas first (HSDP). Experts sharded by ep have their own mesh.
    """
    # Losses leave the model as a view; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    frees = reshard_after_forward(recipe)
    options: dict[str, Any] = {
        # Inputs are not cast: the residual stream stays in fp32 if the model asks for it.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if dtype.itemsize == 2 else None,
            reduce_dtype=torch.float32 if dtype.itemsize == 2 else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if recipe.offload != "none"
        else OffloadPolicy(),
    }
    blocks = list(model.layers.children())
    for block in blocks:
        # The backward of the last block begins at once.
        keeps = block is blocks[-1] and recipe.reshard_after_forward == "auto"
        block_options = {**options, "reshard_after_forward": False if keeps else frees}
        _shard_parts(block, mesh, expert_fsdp_mesh, block_options)
        fully_shard(block, mesh=mesh, **block_options)
    if model.mtp is not None:  # the block itself stays with the root
        _shard_parts(model.mtp, mesh, expert_fsdp_mesh, {**options, "reshard_after_forward": frees})
    first, last = separate_ends(model)
    if first:
        fully_shard(first, mesh=mesh, **options, reshard_after_forward=frees)
    if last:
        # Needed again at once when backward begins.
        fully_shard(last, mesh=mesh, **options, reshard_after_forward=recipe.reshard_after_forward == "always")
    # What is left: nothing, or an embedding that is also the head.
    fully_shard(root, mesh=mesh, **options, reshard_after_forward=False)
    if model.config.has_dropout:
        root.register_forward_pre_hook(read_dropout_seed, with_kwargs=True, prepend=True)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # Summed, not averaged: losses are already divided by the tokens of the global batch.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    if first:
        _as_fsdp(first[0]).set_unshard_in_backward(False)  # the gradient of a lookup does not need the table
    if expert_modules(model):
        _set_prefetch(root, first, blocks, last)


def read_dropout_seed(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the seed of a pipeline stage before FSDP's own hook, which moves every tensor argument to the GPU: reading
    it there, in each layer, would be a host sync. Without a pipeline it is inside ``ModelInputs``, which stays."""
    seed = kwargs.get("dropout_seeds_M")
    return args, kwargs if seed is None else {**kwargs, "dropout_seeds_M": int(seed)}


def separate_ends(model: Z2all) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of a model, or a pipeline stage of one, that are gathered before and after its blocks.

    An embedding that is also the head is needed from beginning to end, and multi-token prediction runs embedding and
    head twice: they stay with the root, which keeps its weights.
    """
    if model.config.tie_word_embeddings or model.mtp is not None:
        return [], []
    first: list[nn.Module] = [model.embed_tokens] if isinstance(model.embed_tokens, nn.Embedding) else []
    last: list[nn.Module] = [model.norm, model.lm_head] if isinstance(model.lm_head, LMHead) else []
    return first, last


def _set_prefetch(root: nn.Module, first: list[nn.Module], blocks: list[nn.Module], last: list[nn.Module]) -> None:
    """Gather the next block while the current one computes.

    FSDP2 does so by itself if the host runs ahead of the device. With experts it does not: it waits for the number of
    tokens of each.
    """
    # A block with its experts and router, which are groups of their own.
    groups: list[list[nn.Module]] = [
        [part for part in block.modules() if isinstance(part, FSDPModule)] for block in blocks
    ]
    in_forward = [units for units in ([root], first, *groups, last[:1]) if units]
    for current, following in pairwise(in_forward):
        _as_fsdp(current[0]).set_modules_to_forward_prefetch([_as_fsdp(unit) for unit in following])
    in_backward = [units for units in ([root], last[:1], *reversed(groups)) if units]
    for current, following in pairwise(in_backward):
        _as_fsdp(current[0]).set_modules_to_backward_prefetch([_as_fsdp(unit) for unit in following])


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def reshard_after_forward(recipe: ParallelRecipe) -> bool | int:
    """What FSDP2 gets: free gathered weights after forward, keep them, or reshard to this many ranks."""
    if isinstance(recipe.reshard_after_forward, int):
        return recipe.reshard_after_forward
    if recipe.reshard_after_forward == "auto":
        return recipe.zero == 3 and recipe.pp == 1
    return recipe.reshard_after_forward == "always"


def _shard_parts(
    block: nn.Module, mesh: DeviceMesh, expert_fsdp_mesh: DeviceMesh | None, options: dict[str, Any]
) -> None:
    """The parts of a block that gather their weights for themselves."""
    if expert_fsdp_mesh is not None:
        _shard_experts(block, expert_fsdp_mesh, options)
    _shard_routers(block, mesh, options)


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


def _shard_routers(block: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Routers gather their weight for themselves, in fp32: a group has one type, and rounded scores choose other
    experts than one process does."""
    full_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    for part in block.modules():
        if isinstance(part, Router) and options["mp_policy"].param_dtype is not None:
            fully_shard(part, mesh=mesh, **{**options, "mp_policy": full_precision})
