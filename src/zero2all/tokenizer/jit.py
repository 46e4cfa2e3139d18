"""JIT compilation with numba, cached on disk, so that only the first use on a machine waits for it.

numba takes most of a second and 100 MB, so ``zero2all.tokenizer`` imports what uses it when a tokenizer is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

JitFunction = TypeVar("JitFunction", bound=Callable[..., object])
_njit: Any = numba.njit  # its type hints lack ``_nrt``


def remove_stale_cache(package: Path) -> None:
    """Remove numba's indexes that are older than the sources of a package.

    numba unpickles an index before it compares its date with the source, and the index may name a class that an upgrade
    has renamed, also one of another module.
    """
    newest = max(source.stat().st_mtime for source in package.glob("*.py"))
    for index in (package / "__pycache__").glob("*.nbi"):
        with suppress(OSError):  # removed by another process, or read-only
            if index.stat().st_mtime < newest:
                index.unlink()


remove_stale_cache(Path(__file__).parent)


def jit(function: JitFunction) -> JitFunction:
    """The function may not allocate arrays, so that it need not count references to them: in the inner loops that would
    take longer than the work."""
    compiled: JitFunction = _njit(cache=True, _nrt=False)(function)
    return compiled


def jit_inline(function: JitFunction) -> JitFunction:
    """For the innermost functions that take tables: passing their arrays costs more than the work inside."""
    compiled: JitFunction = _njit(cache=True, _nrt=False, inline="always")(function)
    return compiled


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
"""Prefetch an element of a contiguous array, by its flat index, without waiting for it.

The index is not checked: a prefetch of an invalid address is ignored.
"""
