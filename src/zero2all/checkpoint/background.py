"""Work on background threads, which must not slow training down."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from zero2all.base.machine.devices import on_current_device

T = TypeVar("T")
BACKGROUND_NICENESS = 10  # relative to training


def run_in_background(function: Callable[[], T], niceness: int = BACKGROUND_NICENESS) -> Future[T]:
    """Call ``function`` on a daemon thread: waiting for a lost rank must not keep the process alive.

    ``niceness`` is relative to the main thread: 0 for work that training soon waits for.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        if sys.platform == "linux":  # per-thread priority: training goes first
            # Relative to the main thread: a background thread may have started this one, with a lower priority.
            priority = os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness
            with suppress(PermissionError):  # only root may raise one that was inherited
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, priority))
        try:
            result = function()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=on_current_device(run), name="z2a-keep", daemon=True).start()
    return outcome
