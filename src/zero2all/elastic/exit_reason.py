"""Why a rank exited, from its exit status, its error message and the kernel log."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero2all.elastic.nccl_messages import CONNECTION_LOST, explain_abort

FailureKind = Literal["crash", "out of memory", "hang", "stopped", "wrong usage", "cut off", "ended by the agent"]
"""``cut off``: the rank lost its connection to another one, which is the cause."""

USAGE_ERROR_STATUS = 2
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|MemoryError|Cannot allocate memory", re.IGNORECASE)
_TIME_OUT = re.compile(r"timed out waiting|collective operation timeout|wait timeout|DistStoreError", re.IGNORECASE)
_STATUSES = {
    126: "the command cannot be executed: check its permissions, and the interpreter in its first line",
    127: "the command was not found: check PATH, and that the environment is the same on every node",
    128: "no signal; in a container on Kubernetes, usually a device or driver that the container does not get: "
    "check 'kubectl describe pod', the nvidia.com/gpu limit and nvidia-smi in the container. Elsewhere an invalid "
    "argument to exit, or a program such as git: see the last log lines",
    255: "exit(-1), or an ssh connection that failed: see the last log lines",
}
_SIGNALS = {
    signal.SIGKILL: "killed by another process: the OOM killer (see dmesg), a scheduler or a person",
    signal.SIGSEGV: "segmentation fault: a bug in native code, or bad memory",
    signal.SIGBUS: "bus error: a mapped file was truncated, or /dev/shm is full",
    signal.SIGABRT: "native code aborted: see the last log lines",
    signal.SIGFPE: "arithmetic fault in native code",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGTERM: "ended by SIGTERM before it could save",
    signal.SIGINT: "ended by Ctrl-C before it could save",
}


@dataclass(frozen=True)
class ExitReason:
    kind: FailureKind
    description: str
    time: float = 0.0
    """When, in seconds since the epoch, if the log tells."""


def classify_exit(status: int, message: str, oom_killed: bool = False, log: Sequence[str] = ()) -> ExitReason:
    """``status`` as a shell (137) or Python (-9) reports it; ``message`` is the error of the rank, if it wrote one.

    ``log`` has its last lines.
    """
    number = _signal_number(status)
    if number == signal.SIGABRT and (found := explain_abort(log)) is not None:
        return ExitReason(found.kind, f"{found.description} (exit status 134)", found.time)
    if number == signal.SIGKILL and oom_killed:
        return ExitReason("out of memory", "killed by the kernel: the memory limit was reached (exit status 137)")
    if number is not None:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        words = _SIGNALS.get(signal.Signals(number), "") if number in set(signal.Signals) else ""
        return ExitReason("crash", f"{name} (exit status {128 + number})" + (f": {words}" if words else ""))
    if message.startswith("Interrupted:"):
        return ExitReason("stopped", "stopped gracefully, with its state saved")
    if status == USAGE_ERROR_STATUS:
        return ExitReason("wrong usage", "the command or the recipe is invalid (exit status 2)")
    if _NO_MEMORY.search(message):
        return ExitReason("out of memory", "requested more memory than available")
    if CONNECTION_LOST.search(message):
        return ExitReason("cut off", "lost its connection to another rank")
    if _TIME_OUT.search(message):
        return ExitReason("cut off", "waited too long for another rank (time-out of a collective)")
    if message:
        return ExitReason("crash", f"raised an error (exit status {status})")
    return ExitReason("crash", f"exit status {status}" + (f": {_STATUSES[status]}" if status in _STATUSES else ""))


def is_signal_exit(status: int) -> bool:
    return _signal_number(status) is not None


def _signal_number(status: int) -> int | None:
    return -status if status < 0 else status - 128 if 128 < status <= 128 + signal.NSIG else None


def oom_kills() -> int:
    """How many processes of this control group the OOM killer has killed so far."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            files = [Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")]
        elif not controllers:
            files = [Path(f"/sys/fs/cgroup{path}/memory.events"), Path("/sys/fs/cgroup/memory.events")]
        else:
            continue
        for file in files:
            if found := re.search(r"^oom_kill (\d+)", _read(file), re.MULTILINE):
                return int(found[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
