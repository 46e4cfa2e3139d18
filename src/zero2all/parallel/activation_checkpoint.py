"""Activation checkpointing: what backward recomputes instead of storing (https://arxiv.org/abs/1604.06174), and
offload of what is stored.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from zero2all.model import Z2all
from zero2all.model.cost.activations import is_offloaded
from zero2all.parallel.activation_offload import ActivationOffload, copies_for
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.torch_private import set_activation_memory_budget


def apply_ac(model: Z2all, recipe: ParallelRecipe, config: ModelConfig, device: torch.device) -> None:
    """Wrap each block's forward, not the block: parameter names stay. Blocks are named by their layer.

    Blocks of a group are run by the model, through the hooks of FSDP: their weights are gathered again to recompute
    them.
    """
    blocks = model.layers
    if recipe.activation_checkpointing == "budget":
        set_activation_memory_budget(recipe.activation_budget)
    elif recipe.activation_checkpointing != "none":
        # Saving the state of the random number generator takes time, and only dropout draws numbers.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": config.has_dropout}
        if recipe.activation_checkpointing == "selective":
            from zero2all.parallel.selective_checkpoint import selective_checkpoint_contexts

            options["context_fn"] = selective_checkpoint_contexts
        if recipe.activation_checkpointing_every > 1:
            model.blocks_per_group = recipe.activation_checkpointing_every
            model.recompute_group = functools.partial(checkpoint, **options)
        else:
            for block in blocks.children():
                block.forward = functools.partial(checkpoint, block.forward, **options)
    if recipe.activation_offload:
        offload = ActivationOffload(copies_for(device))
        for number, (name, block) in enumerate(blocks.named_children()):
            if is_offloaded(int(name), config):
                offload.wrap(block, is_first=number == 0)
            else:
                offload.wrap_last(block)
