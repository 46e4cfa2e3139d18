"""Bytes that a rank holds in training: of the model, the optimizer and its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from pydantic import computed_field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero2all.model.blocks import LMHead
from zero2all.model.cost.activations import ActivationShards, activation_bytes, loss_bytes
from zero2all.model.cost.flops import Recompute
from zero2all.model.cost.optimizer_state import optimizer_state_bytes
from zero2all.parallel.batch_split import BatchSplit, split_batch
from zero2all.parallel.fsdp import reshard_after_forward
from zero2all.parallel.mesh import ParallelDims
from zero2all.parallel.parallelize import LocalModel
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight
from zero2all.recipe import ParallelRecipe, Recipe, ResolvedStage
from zero2all.torch_private import fsdp_param_groups, unsharded_numel
from zero2all.units import show_bytes

FP32_BYTES = 4


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
    with gradient_sync: last, of the full unsharded part of the model."""
    activations: int
    """Estimate: kept for the backward pass, of all micro-batches that a pipeline rank has in flight."""
    logits: int
    """Estimate: of the loss."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def rank_memory(
    local_model: LocalModel,
    shards: Mapping[str, int],
    recipe: Recipe,
    parallel_dims: ParallelDims,
    dtype: torch.dtype,
    device: torch.device,
    pp_rank: int,
) -> RankMemory:
    """``shards`` are the elements that a rank holds of each parameter. The sum is more than the peak: activations and
    gradients are not at their largest at the same time."""
    optimizer, dims = recipe.train.optimizer, {name: p.dim() for name, p in _named_parameters(local_model).items()}
    held = FP32_BYTES * sum(shards.values())
    gathered, unsharded = (
        _fsdp_buffer_bytes(local_model, recipe, parallel_dims, dtype)
        if local_model.uses_fsdp
        else (_autocast_copy_bytes(local_model, dtype, recipe), 0)
    )
    activations, logits = _micro_batch_bytes(local_model, recipe, parallel_dims, dtype, device, pp_rank)
    return RankMemory(
        parameters=held,
        gradients=held,
        optimizer=sum(optimizer_state_bytes(optimizer, name, dims[name]) * count for name, count in shards.items()),
        gathered_weights=gathered,
        unsharded_gradients=unsharded,
        activations=activations,
        logits=logits,
    )


def memory_lines(memory: RankMemory, dtype: str) -> list[str]:
    """A table of the parts, and their sum."""
    parts = {
        "weights (fp32)": (memory.parameters, ""),
        "gradients (fp32)": (memory.gradients, ""),
        "optimizer state": (memory.optimizer, ""),
        f"weights in {dtype}": (memory.gathered_weights, "gathered by FSDP, or copied by autocast"),
        "unsharded gradients": (memory.unsharded_gradients, ""),
        "activations": (memory.activations, "estimate, without torch.compile"),
        "logits": (memory.logits, "estimate"),
    }
    shown = [f"  {name:<22}{show_bytes(size):>8}  {note}".rstrip() for name, (size, note) in parts.items() if size]
    return [f"memory of a rank: at most {show_bytes(memory.total)}", *shown]


def _micro_batch_bytes(
    local_model: LocalModel,
    recipe: Recipe,
    parallel_dims: ParallelDims,
    dtype: torch.dtype,
    device: torch.device,
    pp_rank: int,
) -> tuple[int, int]:
    """Activations and logits in the training stage that takes the most."""
    parallel, half = recipe.parallel, dtype.itemsize == 2
    mode = parallel.activation_checkpointing
    kept = parallel.activation_budget if mode == "budget" else 1.0
    gathered_keys = parallel_dims.cp if parallel.cp_attention == "allgather" else 1
    shards = ActivationShards(parallel_dims.tp, parallel.sp, gathered_keys)
    layers = [int(name) for part in local_model.model_parts for name, _ in part.layers.named_children()]
    has_head = any(isinstance(part.lm_head, LMHead) for part in local_model.model_parts)
    found = []
    for stage in recipe.train.resolved_stages():
        split = split_stage(stage, parallel, parallel_dims)
        tokens = split.samples * stage.seq_len // parallel_dims.cp
        in_flight = micro_batches_in_flight(parallel, pp_rank, split.micro_batches)
        recompute: Recompute = "none" if mode == "budget" else mode
        activations = kept * activation_bytes(recipe.model, tokens, half, recompute, layers, in_flight, shards)
        logits = loss_bytes(recipe.model, tokens, half, device, parallel_dims.tp, parallel.loss_parallel)
        found.append((round(activations), logits if has_head else 0))
    return max(found, key=sum)


def split_stage(stage: ResolvedStage, parallel: ParallelRecipe, parallel_dims: ParallelDims) -> BatchSplit:
    """How a step of a training stage is split, after any batch ramp."""
    micro = stage.micro_batch_tokens and stage.micro_batch_tokens // stage.seq_len
    pipeline_stages = parallel.pp * parallel.stages_per_rank
    return split_batch(stage.batch_tokens // stage.seq_len, parallel_dims.dp, micro, pipeline_stages)


def _fsdp_buffer_bytes(
    local_model: LocalModel, recipe: Recipe, parallel_dims: ParallelDims, dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes of gathered weights and of gradients that are not reduced yet."""
    blocks = sorted(
        (_unsharded_elements(block) for part in local_model.model_parts for block in part.layers.children()),
        reverse=True,
    )
    unsharded = sum(_unsharded_elements(root) for root in (local_model.stages or local_model.model_parts))
    ends = unsharded - sum(blocks)  # embedding, last norm and head are gathered for all of forward and backward
    in_flight = dtype.itemsize * (ends + blocks[0]) + FP32_BYTES * max(ends, blocks[0])
    if recipe.parallel.gradient_sync == "last" and uses_gradient_accumulation(recipe, parallel_dims):
        in_flight += FP32_BYTES * unsharded
    return dtype.itemsize * (ends + _gathered_elements(blocks, recipe.parallel)), in_flight


def _gathered_elements(blocks: list[int], parallel: ParallelRecipe) -> int:
    frees = reshard_after_forward(parallel)
    if frees is False:
        return sum(blocks)
    pair = sum(blocks[:2])  # the current block, and the next one being prefetched
    return pair if frees is True else pair + sum(blocks[2:]) // frees


def _autocast_copy_bytes(local_model: LocalModel, dtype: torch.dtype, recipe: Recipe) -> int:
    if dtype.itemsize == FP32_BYTES:
        return 0
    return dtype.itemsize * sum(
        _to_local(parameter).numel()
        for name, parameter in _named_parameters(local_model).items()
        if parameter.dim() > 1
        and (recipe.model.tie_word_embeddings or "embed_tokens" not in name)  # a lookup is not cast
    )


def uses_gradient_accumulation(recipe: Recipe, parallel_dims: ParallelDims) -> bool:
    """Whether a rank has several micro-batches in a step of some stage."""
    stages = recipe.train.resolved_stages()
    return any(split_stage(stage, recipe.parallel, parallel_dims).micro_batches > 1 for stage in stages)


def _named_parameters(local_model: LocalModel) -> dict[str, Tensor]:
    return {name: parameter for part in local_model.model_parts for name, parameter in part.named_parameters()}


def _unsharded_elements(module: nn.Module) -> int:
    """Of a module's unsharded parameters: of what tp and ep leave to this rank."""
    return sum(unsharded_numel(parameter) for group in fsdp_param_groups(module) for parameter in group.fsdp_params)


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
