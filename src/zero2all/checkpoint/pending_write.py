"""The durable checkpoint that is being written in the background while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from zero2all.base.console import say
from zero2all.base.errors import Z2aError
from zero2all.base.units import show_seconds
from zero2all.checkpoint.background import run_in_background
from zero2all.checkpoint.rank_group import COLLECTIVE_TIMEOUT

FAILURE_GRACE = 5.0  # seconds
HEARTBEAT_INTERVAL = 1.0  # seconds between two heartbeats while waiting for storage
LOG_INTERVAL = 60.0  # seconds between two log lines about it


class PendingWrite:
    """The background write of a checkpoint, at most one at a time.

    >>> pending.start(lambda: store.write(...))
    >>> error = pending.take_error()   # waits for it
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        self._future: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> Future[None]:
        self._future = run_in_background(write)
        return self._future

    def is_running(self) -> bool:
        return self._future is not None and not self._future.done()

    def wait(self) -> None:
        """Wait for the write; ``take_error`` still returns its error."""
        if self._future is not None:
            self._wait_for(self._future)

    def wait_briefly(self) -> None:
        """Give the write a few seconds, since the process is about to fail."""
        if self._future is not None:
            with suppress(Exception):
                self._future.exception(FAILURE_GRACE)

    def take_error(self) -> Exception | None:
        """Wait for the write, forget it, and return its error. An error that storage cannot cause is raised."""
        future, self._future = self._future, None
        error = None if future is None else self._wait_for(future)
        if error is not None and not isinstance(error, Z2aError | OSError):
            raise error
        return error

    def _wait_for(self, write: Future[None]) -> BaseException | None:
        """Wait for a write, sending heartbeats; these end at a time-out, since storage itself may hang."""
        started = time.monotonic()
        log_at = LOG_INTERVAL
        while True:
            with suppress(TimeoutError):
                return write.exception(HEARTBEAT_INTERVAL)
            waited = time.monotonic() - started
            if waited < COLLECTIVE_TIMEOUT.total_seconds():
                self._on_wait()
            if waited >= log_at:
                say(f"still waiting for storage, for {show_seconds(waited)} so far")
                log_at = waited + LOG_INTERVAL
