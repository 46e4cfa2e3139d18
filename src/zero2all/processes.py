"""No process that we start outlives the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

AGENT_PID = "Z2A_AGENT_PID"  # the environment variable that tells a rank which process has started it
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


def end_with_agent() -> None:
    """Called first thing in a rank, before it imports torch: an agent may be killed in those seconds, or before.

    What the rank starts is no rank, so the variable is not passed on.
    """
    agent = int(os.environ.pop(AGENT_PID, "0"))
    if agent and sys.platform == "linux" and not _descends_from(agent):
        os.kill(os.getpid(), signal.SIGKILL)
    end_with_parent(agent if agent == os.getppid() else None)


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


def _descends_from(ancestor: int) -> bool:
    """Something may stand between the two, such as numactl; the children of a killed process go to another one."""
    pid = os.getppid()
    while pid > 1 and pid != ancestor:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True  # it cannot be told, as where /proc shows no process of another user
        pid = int(stat.rpartition(")")[2].split()[1])  # the name before may contain anything
    return pid in (ancestor, 0)  # 0: the parent is in another PID namespace


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
