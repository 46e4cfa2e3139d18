"""Selective activation checkpointing: products, attention and exchanges are kept, everything else is recomputed.

torch's own contexts want the recomputed forward to run exactly the operations of the first one. It does not where a
part of the block is sharded by itself (experts under ep): whether its weights have to be gathered depends on what was
prefetched. So only the operations that are kept are matched, and all others just run.
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
KEPT = {
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
    # Sending again what was sent costs more than the memory of what came.
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::reduce_scatter_tensor",
}


@functools.cache
def is_kept(op: Any) -> bool:
    """Whether what an operation gives is kept for backward; higher-order operators have a name and no schema."""
    return (op._schema.name if isinstance(op, OpOverload) else op.name()) in KEPT


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


class _Keeps(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first forward. Under torch.compile every operation is marked, and the compiler does the rest."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_kept(op) or _is_compiling(op, args, kwargs or {}):  # type: ignore[no-untyped-call]
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


class _Reuses(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """The recomputed one."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_kept(op) or _is_compiling(op, args, kwargs or {}):  # type: ignore[no-untyped-call]
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


# Higher-order operators know modes by their exact type.
for _operator in (inductor_compiled_code, triton_kernel_wrapper_mutation):
    for _mode in (_Keeps, _Reuses):
        redirect_to_mode(_operator, _mode)


def contexts() -> tuple[_Keeps, _Reuses]:
    """For one checkpointed call, what ``create_selective_checkpoint_contexts`` would give."""
    storage: dict[Any, dict[int, Any]] = defaultdict(dict)
    return _Keeps(_policy, storage), _Reuses(_policy, storage)
