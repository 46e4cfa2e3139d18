"""``train.micro_batch_tokens: auto``: the largest micro-batch that fits, by the memory estimate, on a GPU by trial.

A rank that runs out of memory in a collective would leave the others waiting there. So the trial is each rank's own: on
a model with all layers, in which layers of one kind share their weights, beside a reservation for all else that
training holds. It keeps the activations of the real model, and needs no other rank.
"""

from __future__ import annotations

import bisect
import gc
import math
import operator
import os
from collections.abc import Callable

import torch
from torch import nn

from zero2all.base.console import say
from zero2all.base.errors import Z2aError, is_out_of_memory
from zero2all.base.machine.devices import free_memory
from zero2all.base.units import show_bytes
from zero2all.checkpoint import RankGroup
from zero2all.model import ModelInputs, Z2all
from zero2all.model.moe import MoE
from zero2all.model.z2all import Block
from zero2all.parallel import ParallelModel
from zero2all.parallel.activation_checkpoint import apply_ac
from zero2all.parallel.mesh import ParallelDims, split_batch
from zero2all.planner.rank_plan import (
    ACTIVATIONS,
    APART,
    LOGITS,
    STORED,
    USABLE_MEMORY,
    MemoryPlan,
    plan_rank_memory,
    plan_recipe_memory,
)
from zero2all.planner.workload import GPU, Layout, Workload
from zero2all.recipe import Recipe
from zero2all.train.hyperparameters import AS_IN_RUN, MICRO_BATCH_TOKENS, ChosenValue, with_hyperparameters

USED_FRACTION = 0.9  # of the free memory, by the sum of tensors: allocators leave gaps
TRIAL_DEVICES = ("cuda",)  # a process that uses up main memory is killed without a word


def is_open(recipe: Recipe) -> bool:
    return recipe.train.micro_batch_tokens == "auto"


def micro_batch_sizes(recipe: Recipe, dims: ParallelDims) -> list[int]:
    """Samples that a micro-batch may have, ascending: they divide each rank's part of the batch, and leave a pipeline
    as many micro-batches as it has without a size."""
    train, stages = recipe.train, recipe.parallel.pp * recipe.parallel.stages_per_rank
    batches = [stage.batch_tokens // stage.seq_len for stage in train.resolved_stages() if not stage.micro_batch_tokens]
    splits = [split_batch(batch, dims.dp * recipe.parallel.sync.islands, None, stages) for batch in batches]
    rows = math.gcd(*(split.micro_batches * split.samples for split in splits))
    largest = min(split.samples for split in splits)
    return [size for size in range(1, largest + 1) if rows % size == 0]


def with_micro_batch(recipe: Recipe, samples: int) -> Recipe:
    return with_hyperparameters(recipe, [_chosen(recipe, samples, "")])


def estimate_micro_batch(
    recipe: Recipe, world_size: int, free: int | None, device: torch.device = GPU
) -> list[ChosenValue]:
    """The choice before there are ranks, by the memory estimate alone; none if the free memory of a device is not
    known."""
    if not is_open(recipe) or free is None:
        return []

    def needed(samples: int) -> int:
        return plan_recipe_memory(with_micro_batch(recipe, samples), world_size, device).total

    sizes = micro_batch_sizes(recipe, ParallelDims.from_recipe(recipe.parallel, world_size))
    share = USABLE_MEMORY if device.type == "cuda" else USED_FRACTION  # the plan of a GPU has a margin of its own
    return [_chosen(recipe, _largest_fitting(sizes, needed, int(share * free)), _estimate_source(free))]


def choose_micro_batch(
    recipe: Recipe, model: ParallelModel, *, compile: bool, ranks: RankGroup, stored: int | None = None
) -> list[ChosenValue]:
    """The choice of a run whose model is built; the same on every rank. ``stored`` is the earlier choice of a run that
    is resumed: kept if it fits here, since other ranks and devices leave other memory free."""
    if not is_open(recipe):
        return []
    sizes, device = micro_batch_sizes(recipe, model.mesh.dims), model.mesh.device
    free = free_device_memory(device, int(os.environ.get("LOCAL_WORLD_SIZE", model.mesh.dims.world_size)))
    if free is None:
        return [_chosen(recipe, sizes[-1], "free memory is not known on this system")]

    def needed(samples: int) -> int:
        memory = _memory(with_micro_batch(recipe, samples), model)
        return memory.peak - memory.bytes_of(STORED)  # the weights are on the device already

    if stored is not None and (samples := stored // recipe.train.seq_len) in sizes:
        if ranks.reduce(lambda: needed(samples) <= free, operator.and_):  # all of it, so that a resume keeps the value
            return [_chosen(recipe, samples, AS_IN_RUN)]
        say(f"the run had a micro-batch of {samples} samples, which does not fit into memory here")
    samples = ranks.reduce(lambda: _largest_fitting(sizes, needed, int(USED_FRACTION * free)), min)
    least = ranks.reduce(lambda: free, min)
    if device.type not in TRIAL_DEVICES or not _can_try(model.mesh.dims):
        return [_chosen(recipe, samples, _estimate_source(least))]
    memory = _memory(recipe, model)
    rest = memory.peak - memory.bytes_of(STORED, ACTIVATIONS, LOGITS, APART)
    samples, trials = back_off(
        sizes, samples, lambda size: try_micro_batch(recipe, model, compile=compile, samples=size, rest=rest), ranks
    )
    return [_chosen(recipe, samples, f"tried on {device.type}, trials: {trials}")]


def back_off(sizes: list[int], samples: int, run: Callable[[int], None], ranks: RankGroup) -> tuple[int, int]:
    """The first of ``samples``, at most half of it, and so on that no rank runs out of memory with, and how many were
    tried."""
    trials = 0
    while True:
        trials += 1
        if ranks.reduce(lambda size=samples: _fits(run, size), operator.and_):  # type: ignore[misc]
            return samples, trials
        smaller = [size for size in sizes if size <= samples // 2]
        if not smaller:
            raise Z2aError(
                f"a micro-batch of {samples} samples does not fit into memory: set "
                "parallel.activation_checkpointing=full, a shorter train.seq_len, or use more ranks"
            )
        say(f"a micro-batch of {samples} samples does not fit into memory; trying {smaller[-1]}")
        samples = smaller[-1]


def try_micro_batch(recipe: Recipe, model: ParallelModel, *, compile: bool, samples: int, rest: int) -> None:
    """Forward and backward pass of a micro-batch in the memory that training would leave; raises if it does not fit.

    ``rest`` are the bytes that training will hold beside the weights, activations and logits.
    """
    device, length = model.mesh.device, recipe.train.seq_len
    stand_in = shared_weight_model(model, compile=compile)
    own = sum((1 + parameter.requires_grad) * parameter.nbytes for parameter in stand_in.parameters())  # with gradients
    reserved = torch.empty(max(0, rest - own), dtype=torch.uint8, device=device)
    tokens = torch.zeros(samples, length, dtype=torch.int64, device=device)
    starts = torch.zeros_like(tokens, dtype=torch.int32) if recipe.train.masks_documents else None
    try:
        with torch.autocast(device.type, model.dtype, enabled=model.dtype != torch.float32):
            losses = stand_in(ModelInputs(tokens, targets_BS=tokens, doc_starts_BS=starts))
        losses.sum().backward()
    finally:
        if compile:
            torch.compiler.reset()  # it would take the first training batch for a change of shape
    del reserved


def shared_weight_model(model: ParallelModel, *, compile: bool) -> Z2all:
    """A model with the layers and activations of a rank's own and little else: layers of one kind share weights."""
    device = model.mesh.device
    with torch.device("meta"):
        stand_in = Z2all(model.config)
    templates: dict[bool, Block] = {}
    for block in stand_in.layers:
        assert isinstance(block, Block)
        template = templates.setdefault(isinstance(block.mlp, MoE), block)
        if template is block:
            block.to_empty(device=device)
        else:
            _share_tensors(template, block)
    for part in (stand_in.embed_tokens, stand_in.norm, stand_in.lm_head, stand_in.mtp):
        if part is not None:
            part.to_empty(device=device)
    stand_in.init_weights(0)
    apply_ac(stand_in, model.recipe, model.config, device)
    if compile:
        for block in stand_in.layers:
            block.compile()
    return stand_in.train()


def free_device_memory(device: torch.device, ranks: int) -> int | None:
    """Bytes that a rank can allocate; main memory is divided over the ranks of a machine. None if not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = free_memory()
    return None if free is None else free // ranks


def _largest_fitting(sizes: list[int], needed: Callable[[int], int], limit: int) -> int:
    """The largest size that fits by the estimate, or else the smallest, since the estimate is more than the peak."""
    count = bisect.bisect_right(sizes, limit, key=needed)
    return sizes[max(0, count - 1)]


def _fits(run: Callable[[int], None], samples: int) -> bool:
    try:
        run(samples)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        gc.collect()  # blocks and the graph refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return True


def _can_try(dims: ParallelDims) -> bool:
    """Whether a rank has the activations of the full model on its samples."""
    return dims.tp == dims.cp == dims.pp == dims.ep == 1


def _memory(recipe: Recipe, model: ParallelModel) -> MemoryPlan:
    """The memory of this rank in the training stage that takes the most."""
    mesh, recipe = model.mesh, recipe.model_copy(update={"model": model.config})
    plans = (
        plan_rank_memory(
            Workload.of(recipe, stage, mesh.device),
            Layout.of(recipe, stage, mesh.dims.world_size),
            mesh.coordinate("pp"),
            mesh.device,
        )
        for stage in recipe.train.resolved_stages()
    )
    return max(plans, key=lambda plan: plan.peak)


def _share_tensors(template: nn.Module, block: nn.Module) -> None:
    """Give a block the parameters and buffers of another one."""
    for own, other in zip(block.modules(), template.modules(), strict=True):
        for name, parameter in other.named_parameters(recurse=False):
            own.register_parameter(name, parameter)
        for name, buffer in other.named_buffers(recurse=False):
            own.register_buffer(name, buffer)


def _chosen(recipe: Recipe, samples: int, source: str) -> ChosenValue:
    return ChosenValue(MICRO_BATCH_TOKENS, samples * recipe.train.seq_len, source)


def _estimate_source(free: int) -> str:
    return f"memory estimate, for {show_bytes(free)} of free memory per rank"
