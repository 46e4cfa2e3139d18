"""Collectives on Python objects: a rank that fails must not leave the others waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zero2all.errors import Z2aError

T = TypeVar("T")
CALL_INTERVAL = 5.0  # seconds between two calls while a rank waits
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # writing a checkpoint to slow storage takes long


class RankGroup:
    """The ranks of a run, with their own process group: a thread may use it while training uses another.

    >>> rank_group = RankGroup()
    >>> free = min(rank_group.on_all_ranks(lambda: shutil.disk_usage("/").free))
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if dist.is_initialized() else None
        self.rank = dist.get_rank() if self.group is not None else 0
        self.world_size = dist.get_world_size() if self.group is not None else 1

    def on_all_ranks(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> list[T]:
        """The results of ``function`` on every rank; if it fails on one, it fails on all with that rank's reason.

        ``while_waiting`` is called from a thread every few seconds while this rank, done, waits for the others.
        """
        if self.group is None:
            return [function()]
        mine: tuple[Any, str | None]
        try:
            mine = (function(), None)
        except Exception as error:
            mine = (None, str(error) or type(error).__name__)
            own_error: Exception | None = error
        else:
            own_error = None
        results: list[tuple[Any, str | None]] = [(None, None)] * self.world_size
        with _calling_regularly(while_waiting):
            dist.all_gather_object(results, mine, group=self.group)
        if own_error is not None:
            raise own_error
        for rank, (_, reason) in enumerate(results):
            if reason is not None:
                raise Z2aError(f"{reason} (on rank {rank})")
        return [value for value, _ in results]

    def on_rank0(self, function: Callable[[], T], while_waiting: Callable[[], None] | None = None) -> T:
        """The result of ``function``, called on rank 0 only."""
        results: list[Any] = self.on_all_ranks(lambda: function() if self.rank == 0 else None, while_waiting)
        value: T = results[0]
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
