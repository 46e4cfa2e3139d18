"""Graceful shutdown on Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zero2all.base.console import say
from zero2all.base.processes import leave_terminal, stop_signals


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Set by Ctrl-C, SIGTERM, or SIGHUP when the terminal closes: the current step is finished and saved first.

    A second Ctrl-C stops at once.

    A second SIGTERM changes nothing: schedulers send it to a rank and to its agent, which forwards it.
    """
    stop_event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_event  # only the main thread may install signal handlers
        return

    def request(number: int, frame: FrameType | None) -> None:
        if stop_event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            leave_terminal()
        stop_event.set()
        say("stopping after this step; the state will be saved")

    before = {number: signal.signal(number, request) for number in stop_signals()}
    try:
        yield stop_event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
