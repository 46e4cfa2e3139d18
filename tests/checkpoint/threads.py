"""Ranks as threads of one process: a full job with nodes that come and go takes milliseconds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.checkpoint.helpers import resume, save, tiny_manager, weight_of
from zero2all.base.errors import Z2aError
from zero2all.checkpoint import (
    CheckpointCallbacks,
    CheckpointManager,
    CheckpointStore,
    RankGroup,
    ReplicaOptions,
    TrainingState,
)
from zero2all.checkpoint.training_state import Lineage

T = TypeVar("T")
R = TypeVar("R")
_LOCK = threading.RLock()


class ThreadRankGroup(RankGroup):
    """A ``RankGroup`` for the threads of ``run_threads``: ``collect`` gives each the results of all."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank, self.world_size = rank, world_size
        self._barrier, self._shared = barrier, shared

    def collect(self, function: Callable[[], T]) -> list[T]:
        own_error: Exception | None = None
        try:
            with _LOCK:  # temporary file names contain the process id
                self._shared[self.rank] = (function(), None)
        except Exception as error:
            self._shared[self.rank], own_error = (None, str(error)), error
        self._barrier.wait(120)
        results = list(self._shared)
        self._barrier.wait(120)  # before any of them writes again
        if own_error is not None:
            raise own_error
        for _, reason in results:
            if reason is not None:
                raise Z2aError(reason)
        return [value for value, _ in results]

    def on_all_ranks(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> T:
        return self.collect(function)[self.rank]

    def reduce(
        self, function: Callable[[], T], combine: Callable[[T, T], T], while_waiting: Callable[[], None] | None = None
    ) -> T:
        return functools.reduce(combine, self.collect(function))

    def gather(
        self,
        function: Callable[[], T],
        summarize: Callable[[list[T]], R],
        while_waiting: Callable[[], None] | None = None,
    ) -> R:
        found = self.collect(function)
        return self.on_rank0(lambda: summarize(found))

    def scatter(self, function: Callable[[], T], assign: Callable[[list[T]], Sequence[R]]) -> R:
        found = self.collect(function)
        return self.on_rank0(lambda: assign(found))[self.rank]


class Rank0Store(CheckpointStore):
    """Every thread holds all tensors, and there is no process group: rank 0 writes for all."""

    def write(
        self,
        step: int,
        tensors: dict[str, Any],
        state: TrainingState,
        lineage: Lineage,
        rank_group: RankGroup,
        callbacks: CheckpointCallbacks | None = None,
    ) -> None:
        def write() -> None:
            if rank_group.rank == 0:
                super(Rank0Store, self).write(step, tensors, state, lineage, single_rank(), callbacks)

        rank_group.on_all_ranks(write)


def single_rank() -> RankGroup:
    return ThreadRankGroup(0, 1, threading.Barrier(1), [None])


def run_threads(world_size: int, function: Callable[[RankGroup], T]) -> list[T]:
    """The results of ``function`` on ``world_size`` ranks."""
    barrier, shared = threading.Barrier(world_size), [None] * world_size

    def rank(number: int) -> T:
        try:
            return function(ThreadRankGroup(number, world_size, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))


class Start(NamedTuple):
    """What one rank restored at a start."""

    step: int
    where: str
    weight: float


class ThreadCluster:
    """A run on nodes with their own memory and one shared disk, with a rank for each letter of ``nodes``."""

    def __init__(self, root: Path, replicas: ReplicaOptions | None = None) -> None:
        self.root, self.replicas = root, replicas
        self.checkpoints = Rank0Store(root / "run" / "checkpoints", keep=2)
        self.reasons: list[str] = []
        (root / "run").mkdir(parents=True)

    def memory(self, node: str) -> Path:
        return self.root / f"shm-{node}" / "z2a-key-0"

    def manager(self, rank_group: RankGroup, nodes: str) -> CheckpointManager:
        memory = self.memory(nodes[rank_group.rank])
        return tiny_manager(self.root / "run", memory, rank_group, self.checkpoints, self.replicas)

    def start(
        self, nodes: str, flash: Sequence[int], durable: Sequence[int] = (), weight: float | None = None
    ) -> list[Start]:
        """Restore, train to the given steps, and be killed. ``weight`` tells histories apart; without it each rank has
        its own at each step, so that parts are told apart."""

        def rank(rank_group: RankGroup) -> Start:
            manager, at = self.manager(rank_group, nodes), Start(0, "from scratch", 0.0)
            try:
                if (found := resume(manager)) is not None:
                    at = Start(found.step, found.location, weight_of(manager)[0, 0].item())
                self.reasons.append(manager.decision.reason)
                for step in sorted({*flash, *durable}):
                    weight_of(manager).fill_(step + rank_group.rank / 8 if weight is None else weight)
                    save(manager, step, durable=step in durable)
                    assert manager.memory.replicas is None or manager.memory.replicas.wait(30)
                rank_group.on_all_ranks(lambda: None)
                return at
            finally:
                if manager.memory.replicas is not None:
                    manager.memory.replicas.close()

        return run_threads(len(nodes), rank)
