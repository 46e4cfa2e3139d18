"""Stopping politely."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zero2all.console import say


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM: the step in hand is finished and saved first. A second Ctrl-C stops at once.

    A second SIGTERM changes nothing: schedulers send it to a rank and to its agent, which passes it on.
    """
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping  # in a notebook's worker thread the signals are not ours
        return

    def request(number: int, frame: FrameType | None) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping.set()
        say("stopping after this step; the state will be saved")

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
