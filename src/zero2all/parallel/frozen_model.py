"""A model that is not trained, such as a teacher: sharded like the one that is, without gradients or an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from zero2all.errors import Z2aError
from zero2all.model import Z2all
from zero2all.model.weights import GrownVocabulary, WeightReader, load_weights, unstored_weights
from zero2all.parallel.mesh import ParallelMesh
from zero2all.parallel.parallelize import parallelize
from zero2all.parallel.sharded_init import local_part
from zero2all.recipe import ParallelRecipe


def load_frozen_model(reader: WeightReader, recipe: ParallelRecipe, mesh: ParallelMesh, dtype: torch.dtype) -> Z2all:
    """Each rank reads its own shards. ``dtype`` is that of weights and computation; ``recipe`` has no pipeline.

    >>> teacher = load_frozen_model(weights, recipe.parallel, mesh, torch.bfloat16)
    """
    padded = GrownVocabulary(reader, reader.config, {})
    if missing := unstored_weights(padded):
        raise Z2aError(f"{len(missing)} weights are missing, such as {missing[0]}")
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


def free_gathered_weights(model: Z2all) -> None:
    """FSDP keeps those of the last block and the head for a backward pass, which a frozen model never has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
