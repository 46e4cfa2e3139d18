"""Collectives on Python objects: a rank that fails must not leave the others waiting for it."""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist

from zero2all.base.errors import Z2aError
from zero2all.base.torch_private import PrefixStore, default_store
from zero2all.checkpoint.rank_tree import RankTree

T = TypeVar("T")
R = TypeVar("R")
CALL_INTERVAL = 5.0  # seconds between two calls while a rank waits
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # writing a checkpoint to slow storage takes long
_numbers = itertools.count()  # of the groups of this process: all ranks make the same ones in the same order


class RankGroup:
    """The ranks of a run, with their own connections: a thread may use it while training uses others.

    Objects are pickled, and pass between the ranks of a job only, as in ``dist.all_gather_object``. The ranks are
    connected as a tree (``rank_tree``): the connections of a rank do not grow with the number of ranks. No rank gets
    what it does not ask for: results are combined on their way to rank 0, which sends back what follows from them.

    In every method, if a function fails on one rank, all ranks fail with that rank's reason. ``while_waiting`` is
    called from a thread every few seconds while this rank, done, waits for the others.

    >>> rank_group = RankGroup()
    >>> free = rank_group.reduce(lambda: shutil.disk_usage("/").free, min)
    """

    def __init__(self, members: Sequence[int] | None = None) -> None:
        """All ranks form the group, or all ``members``, each with its place among them as its rank."""
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        number, first = next(_numbers), 0
        if members is not None:
            self.rank, self.world_size, first = members.index(self.rank), len(members), members[0]
        self._tree: RankTree | None = None
        if self.world_size > 1:
            store = PrefixStore(f"z2a/rank-group/{number}/{first}", default_store())
            self._tree = RankTree(store, self.rank, self.world_size, COLLECTIVE_TIMEOUT)

    def on_all_ranks(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> T:
        """This rank's result of ``function``, once all ranks have called it. Nothing but failures is sent."""
        own: list[T] = []
        self.reduce(lambda: own.append(function()), lambda one, other: None, while_waiting)
        return own[0]

    def on_rank0(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> T:
        """The result of ``function``, called on rank 0 only."""
        result: T = self.reduce(
            lambda: function() if self.rank == 0 else cast(Any, None), lambda one, other: one, while_waiting
        )
        return result

    def reduce(
        self, function: Callable[[], T], combine: Callable[[T, T], T], while_waiting: Callable[[], None] | None = None
    ) -> T:
        """The results of ``function`` on all ranks, two at a time combined by ``combine``, in any order."""
        if self._tree is None:
            return function()
        outcome, own_error = _attempt(self.rank, function)
        with _calling_regularly(while_waiting):
            outcome = self._tree.broadcast(self._tree.gather(outcome, partial(_merge, self.rank, combine)))
        return cast(T, _value(outcome, own_error))

    def gather(
        self,
        function: Callable[[], T],
        summarize: Callable[[list[T]], R],
        while_waiting: Callable[[], None] | None = None,
    ) -> R:
        """``summarize`` of the results of all ranks, in the order of ranks: rank 0 computes it, and all get it."""
        if self._tree is None:
            return summarize([function()])
        outcome, own_error = _attempt(self.rank, lambda: {self.rank: function()})
        with _calling_regularly(while_waiting):
            outcome, own_error = self._use_on_rank0(self._tree, outcome, own_error, summarize)
            outcome = self._tree.broadcast(outcome)
        return cast(R, _value(outcome, own_error))

    def scatter(self, function: Callable[[], T], assign: Callable[[list[T]], Sequence[R]]) -> R:
        """This rank's item of what ``assign`` makes of the results of all ranks, in the order of ranks, on rank 0."""
        if self._tree is None:
            return assign([function()])[0]
        outcome, own_error = _attempt(self.rank, lambda: {self.rank: function()})
        outcome, own_error = self._use_on_rank0(self._tree, outcome, own_error, assign)
        outcome = self._tree.scatter(self._parts(outcome) if self.rank == 0 else {})
        return cast(R, _value(outcome, own_error))

    def _use_on_rank0(
        self, tree: RankTree, outcome: bytes, own_error: Exception | None, use: Callable[[list[Any]], object]
    ) -> tuple[bytes, Exception | None]:
        """Collect results by rank; on rank 0 the outcome of ``use``, unless a rank has failed."""
        outcome = tree.gather(outcome, partial(_merge, self.rank, operator.or_))
        if self.rank == 0:
            values, failure = pickle.loads(outcome)
            if failure is None:
                return _attempt(0, lambda: use([values[rank] for rank in range(self.world_size)]))
        return outcome, own_error

    def _parts(self, outcome: bytes) -> dict[int, bytes]:
        values, failure = pickle.loads(outcome)
        if failure is not None:
            return dict.fromkeys(range(self.world_size), outcome)
        return {rank: pickle.dumps((value, None)) for rank, value in enumerate(values)}


def _attempt(rank: int, function: Callable[[], object]) -> tuple[bytes, Exception | None]:
    """The pickled outcome, which is a result or a failure as rank and reason, and that failure."""
    try:
        return pickle.dumps((function(), None)), None
    except Exception as error:
        return pickle.dumps((None, (rank, str(error) or type(error).__name__))), error


def _merge(rank: int, combine: Callable[[Any, Any], Any], outcomes: Sequence[bytes]) -> bytes:
    """The outcome of several ranks: the failure of the first that has failed, or the results combined."""
    loaded = [pickle.loads(outcome) for outcome in outcomes]
    if failures := [failure for _, failure in loaded if failure is not None]:
        return pickle.dumps((None, min(failures)))
    return _attempt(rank, lambda: functools.reduce(combine, [value for value, _ in loaded]))[0]


def _value(outcome: bytes, own_error: Exception | None) -> Any:
    """The result, if no rank has failed."""
    if own_error is not None:
        raise own_error
    value, failure = pickle.loads(outcome)
    if failure is not None:
        rank, reason = failure
        raise Z2aError(f"{reason} (on rank {rank})")
    return value


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
