"""Bytes that a rank holds of a model and its training, activations aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero2all.model.optimizer_state import state_bytes
from zero2all.parallel.accumulation import parameter_groups
from zero2all.parallel.laid import Laid
from zero2all.parallel.layout import Sizes
from zero2all.parallel.shards import frees_gathered_weights
from zero2all.recipe import ParallelRecipe, Recipe

FP32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the worst moment of a step."""

    parameters: int
    """This rank's shards, in fp32."""
    gradients: int
    """Of these shards, in fp32."""
    optimizer: int
    """Its state for these shards."""
    gathered_weights: int
    """In the compute dtype: the blocks that FSDP has gathered at one time, or the copies that autocast makes."""
    unsharded_gradients: int
    """Before they are reduce-scattered: of one block and of embedding and head, with the fp32 buffer of the collective;
    with gradient_sync: last, of the whole unsharded part of the model."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def rank_memory(laid: Laid, shards: Mapping[str, int], recipe: Recipe, sizes: Sizes, dtype: torch.dtype) -> RankMemory:
    """``shards`` are the elements that a rank holds of each parameter."""
    optimizer, dims = recipe.train.optimizer, {name: p.dim() for name, p in _named(laid).items()}
    held = FP32 * sum(shards.values())
    gathered, unsharded = (
        _under_fsdp(laid, recipe, sizes, dtype) if laid.sharded else (_under_autocast(laid, dtype, recipe), 0)
    )
    return RankMemory(
        parameters=held,
        gradients=held,
        optimizer=sum(state_bytes(optimizer, name, dims[name]) * count for name, count in shards.items()),
        gathered_weights=gathered,
        unsharded_gradients=unsharded,
    )


def _under_fsdp(laid: Laid, recipe: Recipe, sizes: Sizes, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of gathered weights and of gradients that are not reduced yet."""
    blocks = sorted((_elements(block) for part in laid.parts for block in part.layers.children()), reverse=True)
    whole = sum(_elements(root) for root in (laid.stages or laid.parts))
    ends = whole - sum(blocks)  # embedding, last norm and head are gathered for all of forward and backward
    in_flight = dtype.itemsize * (ends + blocks[0]) + FP32 * max(ends, blocks[0])
    if recipe.parallel.gradient_sync == "last" and accumulates(recipe, sizes):
        in_flight += FP32 * whole
    return dtype.itemsize * (ends + _gathered_of(blocks, recipe.parallel)), in_flight


def _gathered_of(blocks: list[int], parallel: ParallelRecipe) -> int:
    frees = frees_gathered_weights(parallel)
    if frees is False:
        return sum(blocks)
    pair = sum(blocks[:2])  # the block at work, and the next one on its way
    return pair if frees is True else pair + sum(blocks[2:]) // frees


def _under_autocast(laid: Laid, dtype: torch.dtype, recipe: Recipe) -> int:
    if dtype.itemsize == FP32:
        return 0
    return dtype.itemsize * sum(
        _local(parameter).numel()
        for name, parameter in _named(laid).items()
        if parameter.dim() > 1 and (recipe.model.tied or "embed_tokens" not in name)  # a lookup is not cast
    )


def accumulates(recipe: Recipe, sizes: Sizes) -> bool:
    """Whether a rank has several micro-batches in a step of some stage."""
    for stage in recipe.train.resolved_stages():
        samples = -(-stage.batch_tokens // stage.seq_len // sizes.dp)
        micro = (stage.micro_batch_tokens or stage.seq_len * samples) // stage.seq_len
        if samples > (1 if sizes.pp > 1 else micro):  # a pipeline cuts what a rank has, if nobody says how
            return True
    return False


def _named(laid: Laid) -> dict[str, Tensor]:
    return {name: parameter for part in laid.parts for name, parameter in part.named_parameters()}


def _elements(module: nn.Module) -> int:
    """Of a module's unsharded parameters: of what tp and ep leave to this rank."""
    return sum(parameter._orig_size.numel() for group in parameter_groups(module) for parameter in group.fsdp_params)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
