"""When the gradients of micro-batches are reduced under FSDP2, and what a rank sends, counted as the collectives of
rings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from zero2all.base.torch_private import (
    fsdp_param_groups,
    has_gradient,
    set_reduce_dtype,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
    unsharded_numel,
)
from zero2all.recipe import ParallelRecipe

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
    """Bytes of a number in each reduce-scatter of a parameter in a step. Shards that are added up until replicas are
    all-reduced stay in fp32: see ``set_gradient_sync``."""
    last = gradient_itemsize(recipe)
    earlier = micro_batches - 1 if recipe.reduces_every_micro_batch else 0
    return [FP32_BYTES if replicas > 1 else last] * earlier + [last]


def fsdp_gradient_bytes(roots: Iterable[Any], recipe: ParallelRecipe, micro_batches: int) -> float:
    """Bytes that this rank sends for the gradients of its FSDP2 modules."""
    total = 0.0
    for group in (group for root in roots for group in fsdp_param_groups(root)):
        numel = sum(unsharded_numel(parameter) for parameter in group.fsdp_params if has_gradient(parameter))
        shards = group.mesh_info.shard_mesh_size
        replicas = getattr(group.mesh_info, "replicate_mesh_size", 1)  # HSDP
        for itemsize in reduce_itemsizes(recipe, micro_batches, replicas):
            total += sent_bytes("reduce-scatter", itemsize * numel, shards)
        total += sent_bytes("all-reduce", gradient_itemsize(recipe) * numel / shards, replicas)
    return total


def set_gradient_sync(module: FSDPModule, recipe: ParallelRecipe, replicas: int, *, is_last: bool) -> None:
    """Between forward and backward of a micro-batch: reduce its gradient, or keep it unsharded until the last one.

    Reduce-scattered gradients are accumulated in fp32 shards. Replicas (HSDP) are all-reduced once, with the last.
    """
    every = recipe.reduces_every_micro_batch
    module.set_requires_gradient_sync(every or is_last)
    module.set_requires_all_reduce(is_last or not every)
    if recipe.gradient_dtype == "bf16":
        # Until replicas are all-reduced, FSDP2 adds up their shards in what it sends: those stay in fp32.
        keeps_sum = replicas > 1 and every and not is_last
        set_reduce_dtype(fsdp_param_groups(module), torch.float32 if keeps_sum else torch.bfloat16)


def pipeline_stage_class(recipe: ParallelRecipe, replicas: int) -> Any:
    """Torch's pipeline stage, reducing gradients as the recipe asks: torch's own reduces after the last micro-batch."""
    from torch.distributed.pipelining import PipelineStage  # imports the compiler: only a pipeline waits for it

    if not recipe.reduces_every_micro_batch and recipe.gradient_dtype == "fp32":
        return PipelineStage

    class ReducingStage(PipelineStage):
        def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
            module = self.submod
            if not isinstance(module, FSDPModule):
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            module.set_is_last_backward(False)
            module.set_reshard_after_backward(False)
            set_gradient_sync(module, recipe, replicas, is_last=last_backward)
            if backward_type == "weight":
                return self._weight_gradients(bwd_kwargs["param_groups"]), None
            outputs = (bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
            if backward_type == "full":
                return stage_backward(*outputs), None
            # FSDP2's hooks run here, before there is a gradient of a weight to reduce.
            module.set_requires_gradient_sync(False)
            return stage_backward_input(*outputs, module.parameters())

        def _weight_gradients(self, families: list[dict[str, Any]]) -> tuple[()]:
            """The second half of a split backward, which runs no hooks: reduce after each block, not after the stage.

            ``families`` are weights whose gradients torch computes together.
            """
            groups = fsdp_param_groups(self.submod)
            owners = {
                get_gradient_edge(parameter.unsharded_param).node: number
                for number, group in enumerate(groups)
                for parameter in group.fsdp_params
                if parameter.unsharded_param.requires_grad  # with LoRA most weights are frozen
            }
            by_group: dict[int, list[dict[str, Any]]] = {}
            for family in families:
                # One that spans several is computed before the first of them is reduced.
                by_group.setdefault(min(owners[node] for node in family["params"]), []).append(family)
            for number, group in enumerate(groups):
                stage_backward_weight(self.submod.parameters(), by_group.get(number, []))
                group.post_backward()
            return ()

    return ReducingStage
