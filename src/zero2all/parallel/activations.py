"""Activation checkpointing: what backward computes anew instead of keeping it (https://arxiv.org/abs/1604.06174)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zero2all.recipe import ParallelRecipe

aten = torch.ops.aten
# Dear to compute: matrix products and attention. Everything else is a cheap function of them.
KEEP = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def apply_checkpointing(blocks: nn.Module, recipe: ParallelRecipe) -> None:
    """Set in each block's forward, not around the block: the names of its parameters stay."""
    if recipe.activation_checkpointing == "budget":
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = recipe.activation_budget
    elif recipe.activation_checkpointing != "none":
        more: dict[str, Any] = {}
        if recipe.activation_checkpointing == "selective":
            more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_the_dear)
        for block in blocks.children():
            # No block draws random numbers, so there is no state of generators to bring back.
            again = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)
            block.forward = again


def _keep_the_dear(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE
