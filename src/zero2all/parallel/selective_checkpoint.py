"""Selective activation checkpointing: matmuls, attention and all-to-alls are saved, everything else is recomputed.

torch's own contexts require the recomputed forward to run exactly the operations of the first one. It does not where a
part of the block is sharded separately (experts under ep): whether its weights have to be gathered depends on what was
prefetched. So only saved operations are matched, and all others just run.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._higher_order_ops.utils import redirect_to_mode
from torch._higher_order_ops.wrap import inductor_compiled_code
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _is_compiling,
)

# By name, since most of these are there only if a package is, and only after it was imported.
SAVED_OPS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "zero2all::document_attention",
    "zero2all::expert_product",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "torch_attn::_varlen_attn",
    "flex_attention",
    "inductor_compiled_code",  # in a block that is not compiled, that is flex attention
    # Repeating the collective costs more than the memory of its result.
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::reduce_scatter_tensor",
}


@functools.cache
def is_saved(op: Any) -> bool:
    """Whether an operation's output is saved for backward; higher-order operators have a name and no schema."""
    return (op._schema.name if isinstance(op, OpOverload) else op.name()) in SAVED_OPS


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(op) else CheckpointPolicy.PREFER_RECOMPUTE


class _SavingMode(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first forward. Under torch.compile every operation is marked, and the compiler does the rest."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_saved(op) or _is_compiling(op, args, kwargs or {}):  # type: ignore[no-untyped-call]
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


class _RecomputingMode(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """The recomputed one."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_saved(op) or _is_compiling(op, args, kwargs or {}):  # type: ignore[no-untyped-call]
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


# Higher-order operators know modes by their exact type.
for _operator in (inductor_compiled_code, triton_kernel_wrapper_mutation):
    for _mode in (_SavingMode, _RecomputingMode):
        redirect_to_mode(_operator, _mode)


def selective_checkpoint_contexts() -> tuple[_SavingMode, _RecomputingMode]:
    """For one checkpointed call, what ``create_selective_checkpoint_contexts`` would give."""
    storage: dict[Any, dict[int, Any]] = defaultdict(dict)
    return _SavingMode(_policy, storage), _RecomputingMode(_policy, storage)
