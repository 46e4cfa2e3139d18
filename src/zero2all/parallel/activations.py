"""Activation checkpointing: what backward computes anew instead of keeping it (https://arxiv.org/abs/1604.06174)."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from zero2all.recipe import ParallelRecipe


def apply_checkpointing(blocks: nn.Module, recipe: ParallelRecipe) -> None:
    """Set in each block's forward, not around the block: the names of its parameters stay."""
    if recipe.activation_checkpointing == "budget":
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = recipe.activation_budget
    elif recipe.activation_checkpointing != "none":
        more: dict[str, Any] = {}
        if recipe.activation_checkpointing == "selective":
            from zero2all.parallel.selective import contexts  # brings the compiler: not everyone needs to wait

            more["context_fn"] = contexts
        for block in blocks.children():
            # No block draws random numbers, so there is no state of generators to bring back.
            again = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)
            block.forward = again
