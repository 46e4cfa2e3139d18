"""One way to compile: numba, kept on disk, so that only the first use on a machine waits for it.

Modules that use it are imported inside functions: numba takes most of a second and 100 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    return numba.njit(cache=True)(function)  # type: ignore[return-value]


def inlined(function: Function) -> Function:
    """For the innermost functions that take tables: handing over their arrays costs more than the work inside."""
    return numba.njit(cache=True, inline="always")(function)  # type: ignore[return-value]
