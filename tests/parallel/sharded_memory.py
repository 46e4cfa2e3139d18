"""Bytes of every rank, counted on the sharded model itself: what the planner's formulas are compared with.

The model is sharded on the meta device under a process group whose collectives do nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero2all.base.torch_private import fsdp_param_groups, has_gradient, local_shape_and_offset_at, unsharded_numel
from zero2all.bench.profile.memory_trace import fake_process_group
from zero2all.model import Z2all
from zero2all.model.blocks import LMHead
from zero2all.model.cost.activations import (
    ActivationPolicy,
    ActivationShards,
    activation_bytes,
    dropout_score_bytes,
    loss_bytes,
)
from zero2all.model.cost.flops import Recompute
from zero2all.model.cost.model_size import optimizer_state_bytes, weight_dtype
from zero2all.parallel.fsdp import reshard_after_forward, separate_ends
from zero2all.parallel.mesh import ParallelDims, ParallelMesh, split_stage
from zero2all.parallel.parallelize import ModelShard, parallelize
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight
from zero2all.parallel.sharded_init import to_local
from zero2all.planner.rank_plan import FP32_BYTES, FsdpUnits
from zero2all.planner.workload import planned_dtype
from zero2all.recipe import Recipe

GPU = torch.device("cuda")


@dataclass(frozen=True)
class StageSummary:
    """What the ranks of one pipeline rank hold."""

    stage: int
    layers: list[int]
    parameters: int
    """Elements of the stage, before sharding."""
    least: int
    most: int
    """Elements on the rank with the fewest and on that with the most."""
    memory: RankMemory
    """Of the rank with the most."""


@dataclass(frozen=True)
class DryRun:
    """The layout of a model on some ranks."""

    mesh: ParallelDims
    parameters: int
    stages: list[StageSummary]

    @property
    def memory_per_rank(self) -> RankMemory:
        """Of the rank with the most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)


def dry_run(recipe: Recipe, world_size: int, device: torch.device = GPU) -> DryRun:
    """The mesh, what every pipeline rank holds and its bytes; checked to add up to the full model.

    ``device`` is what the ranks would train on; it need not be there.
    """
    config = recipe.model
    if config.vocab_size is None:
        config = config.model_copy(update={"vocab_size": recipe.tokenizer.vocab_size})
        recipe = recipe.model_copy(update={"model": config})
    parallel_dims = ParallelDims.from_recipe(recipe.parallel, world_size)
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Z2all(config).parameters())
    stages = [_stage_summary(recipe, parallel_dims, stage, device) for stage in range(parallel_dims.pp)]
    assert sum(stage.parameters for stage in stages) == total
    return DryRun(parallel_dims, total, stages)


def _stage_summary(recipe: Recipe, parallel_dims: ParallelDims, stage: int, device: torch.device) -> StageSummary:
    """Parallelize as the first rank of a stage, then count for all ranks of it."""
    has_group = parallel_dims.world_size > 1 or recipe.parallel.offload != "none"
    first_rank = stage * (parallel_dims.world_size // parallel_dims.pp)
    with fake_process_group(first_rank, parallel_dims.world_size) if has_group else nullcontext():
        mesh = ParallelMesh(parallel_dims, torch.device("cpu"), has_group=has_group)  # nothing is computed on it
        stored = weight_dtype(recipe.train.optimizer)
        local_model = parallelize(
            recipe.model, recipe.parallel, mesh, planned_dtype(recipe, device), weight_dtype=stored
        )
        return _summarize_stage(local_model, recipe, parallel_dims, stage, device)


def _summarize_stage(
    local_model: ModelShard, recipe: Recipe, parallel_dims: ParallelDims, stage: int, device: torch.device
) -> StageSummary:
    counts: dict[Any, list[int]] = {}  # parameters of one shape on one mesh are equal
    shards: dict[str, int] = {}  # elements on the rank with the most
    least = total = 0
    for name, parameter in _named_parameters(local_model).items():
        if not isinstance(parameter, DTensor):
            on_ranks = [parameter.numel()]
        else:
            key = (parameter.shape, parameter.device_mesh, parameter.placements)
            if key not in counts:
                counts[key] = _elements_by_rank(parameter)
            on_ranks = counts[key]
            copies = math.prod(
                size
                for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
                if placement.is_replicate()
            )
            assert sum(on_ranks) == parameter.numel() * copies, name
        total += parameter.numel()
        least += min(on_ranks)
        shards[name] = max(on_ranks)
    memory = rank_memory(local_model, shards, recipe, parallel_dims, device, stage)
    return StageSummary(stage, _layers(local_model), total, least, sum(shards.values()), memory)


def _elements_by_rank(parameter: DTensor) -> list[int]:
    """Elements of a parameter on each rank of its mesh."""
    shape = parameter.device_mesh.shape
    return [
        math.prod(local_shape_and_offset_at(parameter.shape, shape, coordinate, parameter.placements)[0])
        for coordinate in itertools.product(*map(range, shape))
    ]


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
    collective; with zero 1 also of the full unsharded part of the model."""
    gradients_between_micro_batches: int
    """What the two before hold from one micro-batch to the next: shards, or with zero 1 all of
    the unsharded part, in fp32. 0 if a step has one micro-batch."""
    activations: int
    """Estimate: kept for the backward pass, of all micro-batches that a pipeline rank has in flight."""
    logits: int
    """Estimate: of the loss."""
    host: int = 0
    """Of the first three: what offload=cpu keeps in the memory of the node instead of the GPU's."""
    files: int = 0
    """Of the first three: what is in files of parallel.offload."""

    @property
    def total(self) -> int:
        """Of the device. Without the gradients between micro-batches, which are in the other fields."""
        others = ("gradients_between_micro_batches", "host", "files")
        return sum(size for name, size in asdict(self).items() if name not in others) - self.host - self.files


def rank_memory(
    local_model: ModelShard,
    shards: Mapping[str, int],
    recipe: Recipe,
    parallel_dims: ParallelDims,
    device: torch.device,
    pp_rank: int,
) -> RankMemory:
    """``shards`` are the elements that a rank holds of each parameter. The sum is more than the peak: activations and
    gradients are not at their largest at the same time."""
    optimizer, parameters = recipe.train.optimizer, _named_parameters(local_model)
    dtype = planned_dtype(recipe, device)
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
    offloads = recipe.parallel.offload != "none" and device.type != "cpu"  # whose memory is the node's
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


def _micro_batch_bytes(
    local_model: ModelShard,
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
    has_head = any(isinstance(part.lm_head, LMHead) for part in local_model.model_parts)
    found = []
    for stage in recipe.train.resolved_stages():
        split = split_stage(stage, parallel, parallel_dims)
        tokens = split.samples * stage.seq_len // parallel_dims.cp
        in_flight = micro_batches_in_flight(parallel, pp_rank, split.micro_batches)
        recompute: Recompute = "none" if mode == "budget" else mode
        policy = ActivationPolicy(
            recompute,
            parallel.activation_checkpointing_every,
            parallel.activation_offload,
            dropout_score_bytes(recipe.model, stage.seq_len, device),
        )
        activations = kept * activation_bytes(
            recipe.model,
            tokens,
            half=half,
            policy=policy,
            layers=_layers(local_model),
            micro_batches=in_flight,
            shards=shards,
        )
        logits = loss_bytes(recipe.model, tokens, half=half, device=device, tp=parallel_dims.tp)
        found.append((round(activations), logits if has_head else 0))
    return max(found, key=sum)


def _fsdp_units(root: nn.Module, model: Z2all, trained: bool = False) -> FsdpUnits:
    """Of all weights, or of those with a gradient."""
    count = functools.partial(_unsharded_elements, trained=trained)
    first, last = (sum(map(count, ends[:1])) for ends in separate_ends(model))
    blocks = [count(block) for block in model.layers.children()]
    return FsdpUnits(first, blocks, last, count(root) - first - last - sum(blocks))


def _fsdp_buffer_bytes(
    local_model: ModelShard, recipe: Recipe, parallel_dims: ParallelDims, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Bytes of gathered weights, of gradients that are not reduced yet, and of those between micro-batches if they are
    unsharded."""
    roots: list[nn.Module] = list(local_model.stages or local_model.model_parts)
    units, reduced = (
        [_fsdp_units(root, model, trained) for root, model in zip(roots, local_model.model_parts, strict=True)]
        for trained in (False, True)
    )
    gathered = dtype.itemsize * sum(unit.gathered_elements(reshard_after_forward(recipe.parallel)) for unit in units)
    in_flight = max(unit.gradient_buffers(dtype.itemsize) for unit in reduced)
    keeps = not recipe.parallel.reduces_every_micro_batch and uses_gradient_accumulation(recipe, parallel_dims)
    between = FP32_BYTES * sum(unit.total for unit in reduced) if keeps else 0
    return gathered, in_flight + between, between


def _autocast_copy_bytes(local_model: ModelShard, dtype: torch.dtype, recipe: Recipe) -> int:
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


def _layers(local_model: ModelShard) -> list[int]:
    return sorted(int(name) for part in local_model.model_parts for name, _ in part.layers.named_children())


def _named_parameters(local_model: ModelShard) -> dict[str, Tensor]:
    return {name: parameter for part in local_model.model_parts for name, parameter in part.named_parameters()}


def _unsharded_elements(module: nn.Module, trained: bool) -> int:
    """Of a module's unsharded parameters, or of those with a gradient: of what tp and ep leave to this rank."""
    return sum(
        unsharded_numel(parameter)
        for group in fsdp_param_groups(module)
        for parameter in group.fsdp_params
        if not trained or has_gradient(parameter)
    )
