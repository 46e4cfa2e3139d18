"""One way to compile: numba, kept on disk, so that only the first use on a machine waits for it.

Modules that use it are imported inside functions: numba takes most of a second and 100 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    return numba.njit(cache=True)(function)  # type: ignore[return-value]


def inlined(function: Function) -> Function:
    """For the innermost functions that take tables: handing over their arrays costs more than the work inside."""
    return numba.njit(cache=True, inline="always")(function)  # type: ignore[return-value]


def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        flag, address = ir.IntType(32), ir.IntType(8).as_pointer()
        wanted = builder.bitcast(builder.gep(data, [arguments[1]]), address)
        call = ir.FunctionType(ir.VoidType(), [address, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), call)
        to_read, to_all_caches, data_cache = ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)
        builder.call(function, [wanted, to_read, to_all_caches, data_cache])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


prefetch: Any = intrinsic(_prefetch)
"""Ask for an element of a contiguous array, counted as if it were flat, without waiting for it.

The index is not checked: an address that is not there is passed over.
"""
