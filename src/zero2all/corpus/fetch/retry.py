"""Waiting between attempts."""

from __future__ import annotations

import random
import threading

from zero2all.corpus.fetch.http_client import FetchError, TransientError
from zero2all.units import show_seconds

MAX_FAILURES = 6  # in a row, without progress
FIRST_WAIT = 0.5  # seconds, doubled after each failure
MAX_WAIT = 30.0
MAX_RETRY_AFTER = 300.0  # seconds that a server may ask for


class Stopped(Exception):
    """The command was interrupted, or failed in another thread."""


class Backoff:
    """Waits longer after each failure in a row, and gives up after a few."""

    def __init__(self, name: str, stop: threading.Event) -> None:
        self.name, self._stop, self._failures = name, stop, 0

    def wait(self, error: TransientError, has_progressed: bool = False) -> None:
        """``has_progressed``: the attempt brought something, so that the next one can begin at once."""
        self._failures = 0 if has_progressed else self._failures + 1
        if self._failures >= MAX_FAILURES:
            raise FetchError(f"{self.name}: {error}, {MAX_FAILURES} times in a row") from error
        seconds = error.retry_after
        if seconds is None:
            seconds = 0.0 if has_progressed else min(MAX_WAIT, FIRST_WAIT * 2 ** (self._failures - 1))
            seconds *= random.uniform(0.5, 1)  # threads that failed together do not return together
        if seconds > MAX_RETRY_AFTER:
            raise FetchError(f"{self.name}: {error}; the server asks to wait {show_seconds(seconds)}") from error
        if self._stop.wait(seconds):
            raise Stopped
