"""``z2a parallel show``: what every rank of a layout would hold, computed on one CPU without weights in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zero2all.errors import UsageError, Z2aError
from zero2all.hardware import compute_dtype, dtype_name
from zero2all.model import Z2all
from zero2all.model.cost.model_size import weight_bytes
from zero2all.model.cost.optimizer_state import weight_dtype
from zero2all.parallel.mesh import ParallelDims, ParallelMesh
from zero2all.parallel.parallelize import LocalModel, parallelize
from zero2all.parallel.rank_memory import RankMemory, memory_lines, rank_memory
from zero2all.recipe import Recipe
from zero2all.torch_private import init_fake_process_group, local_shape_and_offset_at
from zero2all.units import show_count

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
    examples: dict[str, str]
    """Some parameters: full shape, placements, shape on a rank."""


@dataclass(frozen=True)
class DryRun:
    """The layout of a model on ``world`` ranks."""

    world: int
    mesh: dict[str, int]
    """Size of each dimension."""
    parameters: int
    bytes: int
    compute_dtype: str
    memory_per_rank: RankMemory
    """Of the rank with the most."""
    stages: list[StageSummary]


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
    held = sum(stage.parameters for stage in stages)
    if held != total:
        raise Z2aError(f"the ranks hold {held} parameters, the model has {total}: this is a bug in zero2all")
    return DryRun(
        world=world_size,
        mesh={name: getattr(parallel_dims, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        parameters=total,
        bytes=weight_bytes(config, recipe.train.optimizer),
        compute_dtype=dtype_name(planned_dtype(recipe, device)),
        memory_per_rank=max((stage.memory for stage in stages), key=lambda memory: memory.total),
        stages=stages,
    )


def planned_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """A GPU is not asked: auto is taken to be bf16 on it."""
    precision = recipe.train.compute_precision
    return compute_dtype("bf16" if precision == "auto" and device.type == "cuda" else precision, device)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a process group whose collectives do nothing."""
    if dist.is_initialized():
        raise UsageError("this process is a rank of a group already; run this command on its own")
    init_fake_process_group(rank, world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stage_summary(recipe: Recipe, parallel_dims: ParallelDims, stage: int, device: torch.device) -> StageSummary:
    """Parallelize as the first rank of a stage, then count for all ranks of it."""
    has_group = parallel_dims.world_size > 1 or recipe.parallel.offload != "none"
    with (
        nullcontext()
        if not has_group
        else fake_process_group(stage * (parallel_dims.world_size // parallel_dims.pp), parallel_dims.world_size)
    ):
        mesh = ParallelMesh(parallel_dims, torch.device("cpu"), has_group)  # nothing is computed on it
        stored = weight_dtype(recipe.train.optimizer)
        local_model = parallelize(
            recipe.model, recipe.parallel, mesh, planned_dtype(recipe, device), weight_dtype=stored
        )
        return _summarize_stage(local_model, recipe, parallel_dims, stage, device)


def _summarize_stage(
    local_model: LocalModel, recipe: Recipe, parallel_dims: ParallelDims, stage: int, device: torch.device
) -> StageSummary:
    names = {name: parameter for part in local_model.model_parts for name, parameter in part.named_parameters()}
    counts: dict[Any, list[int]] = {}  # parameters of one shape on one mesh are equal
    shards: dict[str, int] = {}  # elements on the rank with the most
    least = total = 0
    for name, parameter in names.items():
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
            if sum(on_ranks) != parameter.numel() * copies:
                raise Z2aError(f"the shards of {name} do not add up to it: this is a bug in zero2all")
        total += parameter.numel()
        least += min(on_ranks)
        shards[name] = max(on_ranks)
    layers = sorted(int(name) for part in local_model.model_parts for name, _ in part.layers.named_children())
    picked = [f"layers.{layers[0]}.self_attn.q_proj.weight", f"layers.{layers[0]}.mlp.down_proj.weight"]
    examples = {
        name: _placement_text(names[name])
        for name in ("embed_tokens.weight", *picked, "lm_head.weight")
        if name in names
    }
    dtype = planned_dtype(recipe, device)
    memory = rank_memory(local_model, shards, recipe, parallel_dims, dtype, device, stage)
    return StageSummary(stage, layers, total, least, sum(shards.values()), memory, examples)


def _elements_by_rank(parameter: DTensor) -> list[int]:
    """Elements of a parameter on each rank of its mesh."""
    shape = parameter.device_mesh.shape
    return [
        math.prod(local_shape_and_offset_at(parameter.shape, shape, coordinate, parameter.placements)[0])
        for coordinate in itertools.product(*map(range, shape))
    ]


def _placement_text(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return f"{tuple(parameter.shape)}, not sharded"
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = ", ".join(
        f"{name}: {'replicated' if placement.is_replicate() else f'Shard({placement.dim})'}"  # type: ignore[attr-defined]
        for name, placement in zip(names, parameter.placements, strict=True)
    )
    return f"{tuple(parameter.shape)}, {placements}; {tuple(parameter.to_local().shape)} on each rank"


def dry_run_text(shown: DryRun) -> str:
    """The same for a person."""
    mesh = " x ".join(f"{name} {size}" for name, size in shown.mesh.items() if size > 1) or "one process"
    lines = [
        f"{show_count(shown.parameters)} parameters on {shown.world} ranks: {mesh}",
        *memory_lines(shown.memory_per_rank, shown.compute_dtype),
    ]
    for stage in shown.stages:
        lines.append(
            f"pipeline rank {stage.stage}: {len(stage.layers)} layers, {show_count(stage.parameters)} "
            f"parameters, {show_count(stage.least)} to {show_count(stage.most)} on each rank"
        )
        lines += [f"  {name} {text}" for name, text in stage.examples.items()]
    return "\n".join([*lines, "the shards of all ranks add up to the full model"])
