"""Activation checkpointing: what backward recomputes instead of storing (https://arxiv.org/abs/1604.06174)."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from zero2all.recipe import ParallelRecipe
from zero2all.torch_private import set_activation_memory_budget


def apply_ac(blocks: nn.Module, recipe: ParallelRecipe) -> None:
    """Wrap each block's forward, not the block: parameter names stay."""
    if recipe.activation_checkpointing == "budget":
        set_activation_memory_budget(recipe.activation_budget)
    elif recipe.activation_checkpointing != "none":
        options: dict[str, Any] = {}
        if recipe.activation_checkpointing == "selective":
            from zero2all.parallel.selective_checkpoint import selective_checkpoint_contexts

            options["context_fn"] = selective_checkpoint_contexts
        for block in blocks.children():
            # No block draws random numbers, so there is no RNG state to restore.
            recomputing = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options
            )
            block.forward = recomputing
