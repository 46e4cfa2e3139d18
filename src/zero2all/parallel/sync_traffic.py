"""What a rank sends to synchronize the gradients of a step, counted as the collectives of rings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from zero2all.recipe import ParallelRecipe
from zero2all.torch_private import fsdp_param_groups, has_gradient, unsharded_numel

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
FP32_BYTES = 4


def sent_bytes(collective: Collective, size: float, ranks: int) -> float:
    """What one rank sends; ``size`` is the bytes of the full tensor: gathered, reduced, or sent by one rank.

    >>> sent_bytes("all-reduce", 1000, ranks=4)
    1500.0
    """
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    return size * {"all-reduce": 2 * share, "send": 1.0}.get(collective, share)


def gradient_itemsize(recipe: ParallelRecipe) -> int:
    """Bytes of a number in what is sent of a gradient."""
    return 2 if recipe.gradient_dtype == "bf16" else FP32_BYTES


def reduce_itemsizes(recipe: ParallelRecipe, micro_batches: int, replicas: int) -> list[int]:
    """Of each reduce-scatter of a parameter in a step. Shards that are added up until replicas are all-reduced stay in
    fp32: see ``set_gradient_sync``."""
    last = gradient_itemsize(recipe)
    earlier = micro_batches - 1 if recipe.reduces_every_micro_batch else 0
    return [FP32_BYTES if replicas > 1 else last] * earlier + [last]


def fsdp_gradient_bytes(roots: Iterable[Any], recipe: ParallelRecipe, micro_batches: int) -> float:
    """Of the FSDP2 modules of this rank."""
    total = 0.0
    for group in (group for root in roots for group in fsdp_param_groups(root)):
        numel = sum(unsharded_numel(parameter) for parameter in group.fsdp_params if has_gradient(parameter))
        shards = group.mesh_info.shard_mesh_size
        replicas = getattr(group.mesh_info, "replicate_mesh_size", 1)  # HSDP
        for itemsize in reduce_itemsizes(recipe, micro_batches, replicas):
            total += sent_bytes("reduce-scatter", itemsize * numel, shards)
        total += sent_bytes("all-reduce", gradient_itemsize(recipe) * numel / shards, replicas)
    return total
