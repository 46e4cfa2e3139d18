"""Apply every kind of parallelism to a model on the meta device: what each rank holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from zero2all.model import Z2all
from zero2all.model.weights import WeightReader, complete_weights, load_weights, set_weight_dtype
from zero2all.parallel.activation_checkpoint import apply_ac
from zero2all.parallel.expert_parallel import apply_ep
from zero2all.parallel.float8 import apply_float8
from zero2all.parallel.fsdp import apply_fsdp
from zero2all.parallel.mesh import ParallelMesh
from zero2all.parallel.pipeline_parallel import (
    StageWrapper,
    build_stage_module,
    layer_costs,
    split_layers,
    stage_indices_of_rank,
)
from zero2all.parallel.sharded_init import local_part
from zero2all.parallel.tensor_parallel import apply_tp
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.recipe.training import Float8Scaling


@dataclass(frozen=True)
class ModelShard:
    """What one rank holds, on the meta device."""

    model_parts: list[Z2all]
    """The model, or this rank's pipeline stages of it."""
    stages: list[StageWrapper]
    """The same as a pipeline runs them; empty without a pipeline."""
    stage_indices: list[int]
    """Indices of the stages."""
    uses_fsdp: bool
    """Whether FSDP2 gathers parameters and reduces gradients."""


def parallelize(
    config: ModelConfig,
    recipe: ParallelRecipe,
    mesh: ParallelMesh,
    dtype: torch.dtype,
    float8: Float8Scaling | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> ModelShard:
    """Pipeline stages first, then tensor and expert parallelism, float8, activation checkpointing, then FSDP around
    all."""
    dims = mesh.dims
    stage_indices = stage_indices_of_rank(recipe, mesh.coordinate("pp"))
    with torch.device("meta"):
        if dims.pp == 1:
            model_parts = [Z2all(config)]
        else:
            split = split_layers(layer_costs(config), dims.pp * recipe.stages_per_rank)
            model_parts = [
                build_stage_module(config, split[index], first=index == 0, last=index == len(split) - 1)
                for index in stage_indices
            ]
        for part in model_parts:
            set_weight_dtype(part, weight_dtype)
            if dims.tp > 1:
                apply_tp(part, mesh.get_mesh("tp"), recipe)
            if dims.ep > 1:
                apply_ep(part, mesh.ep_mesh())
            if float8 is not None:
                apply_float8(part.layers, float8, mesh.device)
            apply_ac(part, recipe, config, mesh.device)
    stages = [StageWrapper(part) for part in model_parts] if dims.pp > 1 else []
    # Replicas of a full model are left to DDP; wherever else gradients are reduced or offloaded, FSDP2 does it.
    uses_fsdp = (dims.dp * dims.cp > 1 and dims.dp_replicate != dims.world_size) or recipe.offload != "none"
    if uses_fsdp:
        expert_fsdp_mesh = mesh.expert_fsdp_mesh() if dims.ep > 1 else None
        roots: list[nn.Module] = list(stages or model_parts)
        for root, part in zip(roots, model_parts, strict=True):
            apply_fsdp(root, part, mesh.fsdp_mesh(), expert_fsdp_mesh, recipe, dtype)
    return ModelShard(model_parts, stages, stage_indices, uses_fsdp)


def load_frozen_model(reader: WeightReader, recipe: ParallelRecipe, mesh: ParallelMesh, dtype: torch.dtype) -> Z2all:
    """Each rank reads its own shards. Weights and computation are in ``dtype``; ``recipe`` has no pipeline.

    >>> teacher = load_frozen_model(weights, recipe.parallel, mesh, torch.bfloat16)
    """
    padded = complete_weights(reader)
    plain = recipe.model_copy(update={"activation_checkpointing": "none"})
    [model] = parallelize(reader.config, plain, mesh, dtype, weight_dtype=dtype).model_parts
    model.requires_grad_(False)
    model.to_empty(device=torch.device("cpu") if recipe.offload != "none" else mesh.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))
    model.init_buffers(mesh.device)
    weights: dict[str, Any] = get_model_state_dict(model)
    load_weights(weights, padded, local_part)
    return model.eval()


def free_gathered_weights(model: nn.Module) -> None:
    """FSDP keeps the last block and the head gathered for a backward pass, which may never come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
