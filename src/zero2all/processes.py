"""No process that we start outlives the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait
from types import FrameType

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def end_with_parent(parent: int | None = None) -> None:
    """Called first thing in a program that one of ours has started and waits for; ``parent`` is its pid, where known.

    The kernel's signal is tied to the thread that started the process, not to its process. So this is for children of a
    thread that stays with them; workers that are kept in a pool call :func:`watch_parent`.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it had been killed before
            os.kill(os.getpid(), signal.SIGKILL)


def watch_parent() -> None:
    """Called first thing in a process of :mod:`multiprocessing`: when its parent is gone, it is killed.

    A worker that waits for its next task would not notice, and one that has a task would finish it for nobody.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="z2a-parent", daemon=True).start()


def stop_on_sigterm() -> None:
    """SIGTERM ends a command as Ctrl-C does: with all that it started, and nothing half-written."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
