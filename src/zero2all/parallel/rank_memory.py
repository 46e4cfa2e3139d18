"""Bytes that a rank holds in training: of the model, the optimizer and its micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from pydantic import computed_field
from torch import Tensor, nn

from zero2all.model import Z2all
from zero2all.model.blocks import LMHead
from zero2all.model.cost.activations import ActivationShards, activation_bytes, dropout_score_bytes, loss_bytes
from zero2all.model.cost.flops import Recompute
from zero2all.model.cost.optimizer_state import optimizer_state_bytes
from zero2all.parallel.batch_split import BatchSplit, split_batch
from zero2all.parallel.fsdp import reshard_after_forward, separate_ends
from zero2all.parallel.mesh import ParallelDims
from zero2all.parallel.parallelize import LocalModel
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import ParallelRecipe, Recipe, ResolvedStage
from zero2all.torch_private import fsdp_param_groups, has_gradient, unsharded_numel
from zero2all.units import show_bytes

FP32_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the worst moment of a step."""

    parameters: int
    """This rank's shards, in fp32; with adamw-bf16 in bf16."""
    gradients: int
    """Of these shards, in the same dtype."""
    optimizer: int
    """Its state for these shards."""
    gathered_weights: int
    """In the compute dtype: the blocks that FSDP has gathered at one time (all with zero 1 and 2 and in a pipeline), or
    the copies that autocast makes."""
    unsharded_gradients: int
    """Before they are reduce-scattered: of two blocks, or of a block and embedding or head, with the fp32 buffer of the
    collective; with zero 1 or gradient_sync: last, also of the full unsharded part of the model."""
    gradients_between_micro_batches: int
    """What the two before hold from one micro-batch to the next: shards, or with zero 1 or gradient_sync: last all of
    the unsharded part, in fp32. 0 if a step has one micro-batch."""
    activations: int
    """Estimate: kept for the backward pass, of all micro-batches that a pipeline rank has in flight."""
    logits: int
    """Estimate: of the loss."""
    host: int = 0
    """Of the first three: what offload=cpu keeps in the memory of the node instead of the GPU's."""
    files: int = 0
    """Of the first three: what is in files of offload_dir."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        """Of the device. Without the gradients between micro-batches, which are in the other fields."""
        others = ("gradients_between_micro_batches", "host", "files")
        parts: list[int] = [getattr(self, f.name) for f in fields(self) if f.name not in others]
        return sum(parts) - self.host - self.files


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
    optimizer, parameters = recipe.train.optimizer, _named_parameters(local_model)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}  # with LoRA the adapters
    held, gradients = (
        sum(parameters[name].dtype.itemsize * count for name, count in shards.items() if name in names)
        for names in (parameters.keys(), trained)
    )
    # The first rank, as which this process acts, holds the most of every parameter.
    shapes = {name: to_local(parameter).shape for name, parameter in parameters.items()}
    gathered, unsharded, between = (
        _fsdp_buffer_bytes(local_model, recipe, parallel_dims, dtype)
        if local_model.uses_fsdp
        else (_autocast_copy_bytes(local_model, dtype, recipe), 0, 0)
    )
    activations, logits = _micro_batch_bytes(local_model, recipe, parallel_dims, dtype, device, pp_rank)
    state = sum(optimizer_state_bytes(optimizer, name, shape) for name, shape in shapes.items() if name in trained)
    files = state if recipe.parallel.offload_dir is not None else 0
    offloads = recipe.parallel.offload == "cpu" and device.type != "cpu"  # whose memory is the node's
    accumulates = uses_gradient_accumulation(recipe, parallel_dims)
    return RankMemory(
        parameters=held,
        gradients=gradients,
        optimizer=state,
        host=held + gradients + state - files if offloads else 0,
        files=files,
        gathered_weights=gathered,
        unsharded_gradients=unsharded,
        gradients_between_micro_batches=(between or gradients) if accumulates else 0,
        activations=activations,
        logits=logits,
    )


def memory_lines(memory: RankMemory, dtype: str) -> list[str]:
    """A table of the parts, and their sum."""
    between = f"{show_bytes(memory.gradients_between_micro_batches)} of gradients between micro-batches"
    between = between if memory.gradients_between_micro_batches else ""
    place = "in host memory" if memory.host else ""
    parts = {
        "weights": (memory.parameters, place),
        "gradients": (memory.gradients, place),
        "optimizer state": (memory.optimizer, "in files" if memory.files else place),
        f"weights in {dtype}": (memory.gathered_weights, "gathered by FSDP, or copied by autocast"),
        "unsharded gradients": (memory.unsharded_gradients, between),
        "activations": (memory.activations, "estimate, without torch.compile"),
        "logits": (memory.logits, "estimate"),
    }
    shown = [f"  {name:<22}{show_bytes(size):>8}  {note}".rstrip() for name, (size, note) in parts.items() if size]
    elsewhere = {"host memory of a rank": memory.host, "files of a rank": memory.files}
    more = [f"{name}: {show_bytes(size)}" for name, size in elsewhere.items() if size]
    return [f"memory of a rank: at most {show_bytes(memory.total)}", *shown, *more]


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
        activations = kept * activation_bytes(
            recipe.model,
            tokens,
            half,
            recompute,
            layers,
            in_flight,
            shards,
            parallel.activation_checkpointing_every,
            parallel.activation_offload,
            dropout_score_bytes(recipe.model, stage.seq_len, device),
        )
        logits = loss_bytes(recipe.model, tokens, half, device, parallel_dims.tp, parallel.loss_parallel)
        found.append((round(activations), logits if has_head else 0))
    return max(found, key=sum)


def split_stage(stage: ResolvedStage, parallel: ParallelRecipe, parallel_dims: ParallelDims) -> BatchSplit:
    """How a step of a training stage is split, after any batch ramp."""
    micro = stage.micro_batch_tokens and stage.micro_batch_tokens // stage.seq_len
    pipeline_stages = parallel.pp * parallel.stages_per_rank
    return split_batch(stage.batch_tokens // stage.seq_len, parallel_dims.dp * parallel.islands, micro, pipeline_stages)


@dataclass(frozen=True)
class FsdpUnits:
    """Unsharded elements of what FSDP gathers together, in a model or a pipeline stage, in the order of forward."""

    first: int
    """The embedding; 0 if it is with the rest."""
    blocks: list[int]
    last: int
    """Last norm and head; 0 if they are with the rest."""
    rest: int
    """What the root holds, gathered for all of forward and backward."""

    @classmethod
    def of(cls, root: nn.Module, model: Z2all, trained: bool = False) -> FsdpUnits:
        """Of all weights, or of those with a gradient."""
        count = functools.partial(_unsharded_elements, trained=trained)
        first, last = (sum(map(count, ends[:1])) for ends in separate_ends(model))
        blocks = [count(block) for block in model.layers.children()]
        return cls(first, blocks, last, count(root) - first - last - sum(blocks))

    @property
    def total(self) -> int:
        return self.first + sum(self.blocks) + self.last + self.rest

    def gathered_elements(self, frees: bool | int) -> int:
        """At the worst moment of forward and backward, with the buffers of all-gathers.

        ``frees`` is what FSDP does after forward (``reshard_after_forward``).
        """
        if frees is False:
            return self.total
        # A unit is copied out of the buffer of its all-gather while that of the unit before is still there. The last
        # block stays gathered for its backward pass.
        units = [unit for unit in (self.first, *self.blocks, self.last) if unit]
        peak = max((before + 2 * unit for before, unit in pairwise([0, *units])), default=0)
        peak = max(peak, 2 * (self.blocks[-1] + self.last)) if self.last and self.blocks else peak
        freed = max(0, self.total - self.rest - peak)
        return self.rest + peak + (0 if frees is True else freed // frees)

    def gradient_buffers(self, itemsize: int) -> int:
        """Bytes of gradients on their way: one unit is reduce-scattered from a buffer in fp32 while backward computes
        the gradient of the next. Those of the root wait for the end."""
        in_order = [self.last, *reversed(self.blocks), self.first, 0]
        moving = [FP32_BYTES * reduced + itemsize * max(reduced, computed) for reduced, computed in pairwise(in_order)]
        return max(max(moving) + itemsize * self.rest, (FP32_BYTES + itemsize) * self.rest)


def _fsdp_buffer_bytes(
    local_model: LocalModel, recipe: Recipe, parallel_dims: ParallelDims, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Bytes of gathered weights, of gradients that are not reduced yet, and of those between micro-batches if they are
    unsharded."""
    roots: list[nn.Module] = list(local_model.stages or local_model.model_parts)
    units, reduced = (
        [FsdpUnits.of(root, model, trained) for root, model in zip(roots, local_model.model_parts, strict=True)]
        for trained in (False, True)
    )
    gathered = dtype.itemsize * sum(unit.gathered_elements(reshard_after_forward(recipe.parallel)) for unit in units)
    in_flight = max(unit.gradient_buffers(dtype.itemsize) for unit in reduced)
    keeps = not recipe.parallel.reduces_every_micro_batch and uses_gradient_accumulation(recipe, parallel_dims)
    between = FP32_BYTES * sum(unit.total for unit in reduced) if keeps else 0
    return gathered, in_flight + between, between


def _autocast_copy_bytes(local_model: LocalModel, dtype: torch.dtype, recipe: Recipe) -> int:
    if dtype.itemsize == FP32_BYTES or recipe.train.optimizer.has_bf16_weights:
        return 0
    return dtype.itemsize * sum(
        to_local(parameter).numel()
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


def _unsharded_elements(module: nn.Module, trained: bool) -> int:
    """Of a module's unsharded parameters, or of those with a gradient: of what tp and ep leave to this rank."""
    return sum(
        unsharded_numel(parameter)
        for group in fsdp_param_groups(module)
        for parameter in group.fsdp_params
        if not trained or has_gradient(parameter)
    )
