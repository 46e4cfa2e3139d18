"""Activation checkpointing: what backward recomputes instead of storing (https://arxiv.org/abs/1604.06174), and
offload of what is stored.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from zero2all.base.torch_private import (
    RecomputeMode,
    SaveMode,
    is_compiling,
    redirect_higher_order_ops,
    set_activation_memory_budget,
)
from zero2all.model import Z2all
from zero2all.model.cost.activations import is_offloaded
from zero2all.parallel.activation_offload import ActivationOffload, copies_for
from zero2all.recipe import ModelConfig, ParallelRecipe

# By name, since most of these are there only if a package is, and only after it was imported.
SAVED_OPS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
    "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "zero2all::document_attention", "zero2all::ring_attention", "zero2all::expert_product",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd", "torch_attn::_varlen_attn",
    # Repeating the collective costs more than the memory of its result.
    "_c10d_functional::all_to_all_single", "_c10d_functional::reduce_scatter_tensor",
}  # fmt: skip


@functools.cache
def is_saved(op: Any) -> bool:
    """Whether an operation's output is saved for backward."""
    return op.name().partition(".")[0] in SAVED_OPS  # aten::mm.out is an overload of aten::mm


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(op) else CheckpointPolicy.PREFER_RECOMPUTE


class _SavingMode(SaveMode):  # type: ignore[no-untyped-call]
    """The first forward. Under torch.compile every operation is marked, and the compiler does the rest."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_saved(op) or is_compiling(op, args, kwargs or {}):
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


class _RecomputingMode(RecomputeMode):  # type: ignore[no-untyped-call]
    """The recomputed one."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_saved(op) or is_compiling(op, args, kwargs or {}):
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


@functools.cache
def _show_higher_order_ops() -> None:
    """Once, and not when this module is imported: it imports parts of the compiler."""
    for mode in (_SavingMode, _RecomputingMode):
        redirect_higher_order_ops(mode)


def selective_checkpoint_contexts() -> tuple[_SavingMode, _RecomputingMode]:
    """For one checkpointed call, what ``create_selective_checkpoint_contexts`` would give.

    torch's own contexts require the recomputed forward to run exactly the operations of the first one. It does not
    where a part of the block is sharded separately (experts under ep): whether its weights have to be gathered depends
    on what was prefetched. So only saved operations are matched, and all others just run.
    """
    _show_higher_order_ops()
    storage: dict[Any, dict[int, Any]] = defaultdict(dict)
    return _SavingMode(_policy, storage), _RecomputingMode(_policy, storage)


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
