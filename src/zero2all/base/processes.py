"""Child processes end with their parent, however the parent ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from zero2all.base.errors import UsageError

AGENT_PID = "Z2A_AGENT_PID"  # environment variable: pid of the agent that started this rank
_PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG


def end_with_parent(parent: int | None = None) -> None:
    """Call first in a program whose parent waits for it; ``parent`` is the pid of the parent, if known.

    The kernel ties the signal to the thread that started the child, not to its process. So this is for children of a
    thread that outlives them; pool workers call :func:`watch_parent`. Other kernels than Linux have no such signal, and
    the child then runs to its end.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent was killed before prctl
            os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent() -> None:
    """Call first in a rank, before it imports torch: the agent may be killed in those seconds, or before.

    Children of the rank are not ranks, so they do not inherit the variable.
    """
    agent = int(os.environ.pop(AGENT_PID, "0"))
    if agent and sys.platform == "linux" and not _descends_from(agent):
        os.kill(os.getpid(), signal.SIGKILL)
    end_with_parent(agent if agent == os.getppid() else None)


def watch_parent() -> None:
    """Call first in a :mod:`multiprocessing` worker: it is killed when its parent dies.

    An idle worker would not notice, and a busy one would finish a task that nobody reads.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_kill_when_ready, args=(parent.sentinel,), name="z2a-parent", daemon=True).start()


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, which it returns: the default of 1,024 is too low for one
    connection to each of a thousand nodes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def require_linux(command: str) -> None:
    """Refuse other systems to commands that start ranks, which rely on /proc and on signals that only Linux sends."""
    if sys.platform != "linux":
        raise UsageError(f"'{command}' runs on Linux only, and this is {sys.platform}: use 'z2a train', in one process")


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that end a command: Ctrl-C, schedulers, and a terminal that closes, unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


def leave_terminal() -> None:
    """Discard what would be printed on a terminal. To be called on SIGHUP: the terminal is gone, and writing fails."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: with its child processes, and no partial files."""
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals()[1:]:
            signal.signal(number, _interrupt)


@contextmanager
def hold_back_interrupts() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP that arrive inside take effect at the end. Signals interrupt the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = {number: signal.signal(number, lambda sent, frame: pending.append(sent)) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for sent in pending:
            signal.raise_signal(sent)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        leave_terminal()
    raise KeyboardInterrupt


def _descends_from(ancestor: int) -> bool:
    """A wrapper such as numactl may be in between; orphans are reparented."""
    pid = os.getppid()
    while pid > 1 and pid != ancestor:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True  # unknown: /proc may hide processes of other users
        pid = int(stat.rpartition(")")[2].split()[1])  # the process name before it may contain anything
    return pid in (ancestor, 0)  # 0: the parent is in another PID namespace


def _kill_when_ready(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def read_text(path: Path) -> str:
    """A file of the kernel or of another process, which may be gone; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def program_output(*words: str, timeout: float, check: bool = False) -> str:
    """What a program prints; empty if it is not installed or does not answer, and with ``check`` if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout, check=check)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def process_start_time() -> float:
    """Start time of this process in seconds since the epoch; now, if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)
    except (OSError, ValueError, AttributeError, IndexError):
        return time.time()
