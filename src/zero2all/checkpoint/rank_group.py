"""Collectives on Python objects: a rank that fails must not leave the others waiting for it."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zero2all.checkpoint.rank_tree import RankTree, pack, unpack
from zero2all.errors import Z2aError
from zero2all.torch_private import PrefixStore, default_store

T = TypeVar("T")
CALL_INTERVAL = 5.0  # seconds between two calls while a rank waits
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # writing a checkpoint to slow storage takes long
_numbers = itertools.count()  # of the groups of this process: all ranks make the same ones in the same order


class RankGroup:
    """The ranks of a run, with their own connections: a thread may use it while training uses others.

    Objects are pickled, and pass between the ranks of a job only, as those of ``dist.all_gather_object`` do. The
    connections are those of a tree (``rank_tree``): their number does not grow with the number of ranks.

    >>> rank_group = RankGroup()
    >>> free = min(rank_group.on_all_ranks(lambda: shutil.disk_usage("/").free))
    """

    def __init__(self) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._tree: RankTree | None = None
        if self.world_size > 1:
            store = PrefixStore(f"z2a/rank-group/{next(_numbers)}", default_store())
            self._tree = RankTree(store, self.rank, self.world_size, COLLECTIVE_TIMEOUT)

    def on_all_ranks(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> list[T]:
        """The results of ``function`` on every rank; if it fails on one, it fails on all with that rank's reason.

        ``while_waiting`` is called from a thread every few seconds while this rank, done, waits for the others.
        """
        if self._tree is None:
            return [function()]
        mine, own_error = _attempt(function)
        with _calling_regularly(while_waiting):
            gathered = self._tree.gather(mine)
            parts = unpack(self._tree.broadcast(pack(gathered) if self.rank == 0 else b""))
        return _values([parts[rank] for rank in range(self.world_size)], own_error)

    def on_rank0(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> T:
        """The result of ``function``, called on rank 0 only."""
        results: list[Any] = self.on_all_ranks(lambda: function() if self.rank == 0 else None, while_waiting)
        value: T = results[0]
        return value


def _attempt(function: Callable[[], object]) -> tuple[bytes, Exception | None]:
    """The pickled result and reason of a failure, and that failure."""
    try:
        return pickle.dumps((function(), None)), None
    except Exception as error:
        return pickle.dumps((None, _reason(error))), error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _values(pickled: list[bytes], own_error: Exception | None) -> list[T]:
    """The results of ranks, if none has failed."""
    if own_error is not None:
        raise own_error
    results = [pickle.loads(part) for part in pickled]
    for rank, (_, reason) in enumerate(results):
        if reason is not None:
            raise Z2aError(f"{reason} (on rank {rank})")
    return [value for value, _ in results]


@contextmanager
def _calling_regularly(function: Callable[[], None] | None) -> Iterator[None]:
    if function is None:
        yield
        return
    done = threading.Event()

    def call() -> None:
        while not done.wait(CALL_INTERVAL):
            function()

    thread = threading.Thread(target=call, name="z2a-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
