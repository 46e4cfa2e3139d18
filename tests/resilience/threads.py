"""Ranks as threads of one process: a whole job with nodes that come and go takes milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zero2all.errors import Z2aError
from zero2all.resilience import Checkpoints, Team

T = TypeVar("T")
_ONE_AT_A_TIME = threading.RLock()


class ThreadTeam(Team):
    """As ``Team``, for the threads of ``run_threads``."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.group, self.rank, self.world = None, rank, world
        self._barrier, self._shared = barrier, shared

    def together(self, function: Callable[[], T]) -> list[T]:
        kept: Exception | None = None
        try:
            with _ONE_AT_A_TIME:  # files are written under names with the number of the process
                self._shared[self.rank] = (function(), None)
        except Exception as error:
            self._shared[self.rank], kept = (None, str(error)), error
        self._barrier.wait(120)
        found = list(self._shared)
        self._barrier.wait(120)  # before any of them writes again
        if kept is not None:
            raise kept
        for _, reason in found:
            if reason is not None:
                raise Z2aError(reason)
        return [value for value, _ in found]


class OneWriter(Checkpoints):
    """Every thread holds all tensors, and there is no process group: the first writes for all."""

    def write(self, step: int, tensors: dict[str, Any], state: dict[str, Any], team: Team) -> None:
        def write() -> None:
            if team.rank == 0:
                super(OneWriter, self).write(step, tensors, state, alone())

        team.together(write)


def alone() -> Team:
    return ThreadTeam(0, 1, threading.Barrier(1), [None])


def run_threads(world: int, function: Callable[[Team], T]) -> list[T]:
    """``function`` on so many ranks; what each of them returns."""
    barrier, shared = threading.Barrier(world), [None] * world

    def rank(number: int) -> T:
        try:
            return function(ThreadTeam(number, world, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))
