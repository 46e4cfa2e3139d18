"""Start ranks for a test: N processes with one gloo group, bounded in time, the failing rank's traceback shown.

>>> losses = on_ranks(4, train_a_little, tmp_path)  # a function of a module, not a lambda: it travels by its name
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero2all.bench.rank_harness import run_ranks


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, seconds: float = 240, detail: bool = True
) -> list[Any]:
    """``function(*args)`` on every rank; results in the order of ranks.

    torch's checks of collectives are on: gloo silently reduces tensors of different shapes. Turn ``detail`` off
    for DDP, which torch 2.13 ends with a segmentation fault under them.
    """
    return run_ranks(ranks, function, *args, seconds=seconds, detail=detail)
