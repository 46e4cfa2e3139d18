"""A process between the harness and code under sandlock: it ends every process of the code, also detached ones.

sandlock kills a process group, which a process can leave. Orphans become children of this process instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType

from zero2all.errors import need

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    arguments = json.loads(sys.argv[1])
    sandlock = need("sandlock", "evals")
    warnings.simplefilter("ignore")  # of sandlock; stderr belongs to the code
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _interrupt)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != arguments["parent"]:
        sys.exit("the parent has died")
    sandbox = sandlock.Sandbox(**arguments["policy"], on_exit="abort", on_error="abort")
    try:
        process = sandbox.popen(arguments["command"])
        waiter = threading.Thread(target=process.wait, daemon=True)
        waiter.start()
        waiter.join()  # unlike the wait itself, it ends when a signal arrives
    finally:
        kill_children()
    if process.wait().reason == sandlock.ExitReason.KILLED:
        sys.exit(128 + signal.SIGKILL)


def kill_children() -> None:
    """Kill and reap children, and their children, which are children of this process once their parent is dead."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while pids := _children():
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # the waiting thread was first


def _children() -> list[int]:
    own = str(os.getpid())
    pids: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[1] == own:
            pids.append(int(stat.parent.name))
    return pids


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
