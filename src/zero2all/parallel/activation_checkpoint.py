"""Activation checkpointing: what backward recomputes instead of storing (https://arxiv.org/abs/1604.06174), and
offload of what is stored.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero2all.model.cost.activations import is_offloaded
from zero2all.model.cost.flops import is_checkpointed
from zero2all.parallel.activation_offload import ActivationOffload, copies_for
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.torch_private import set_activation_memory_budget


def apply_ac(blocks: nn.Module, recipe: ParallelRecipe, config: ModelConfig, device: torch.device) -> None:
    """Wrap each block's forward, not the block: parameter names stay. Blocks are named by their layer."""
    if recipe.activation_checkpointing == "budget":
        set_activation_memory_budget(recipe.activation_budget)
    elif recipe.activation_checkpointing != "none":
        # Saving the state of the random number generator takes time, and only dropout draws numbers.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": config.has_dropout}
        if recipe.activation_checkpointing == "selective":
            from zero2all.parallel.selective_checkpoint import selective_checkpoint_contexts

            options["context_fn"] = selective_checkpoint_contexts
        for name, block in blocks.named_children():
            if is_checkpointed(int(name), recipe.activation_checkpointing_every):
                block.forward = functools.partial(checkpoint, block.forward, **options)
    if recipe.activation_offload:
        offload = ActivationOffload(copies_for(device))
        for number, (name, block) in enumerate(blocks.named_children()):
            if is_offloaded(int(name), config):
                offload.wrap(block, is_first=number == 0)
            else:
                offload.wrap_last(block)
