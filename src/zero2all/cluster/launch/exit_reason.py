"""Why a rank exited, from its exit status, its error message, its log and the kernel log.

A rank that waits in a collective of NCCL cannot raise an error in Python. Its watchdog thread ends the process by
SIGABRT instead, for three reasons with different causes: a collective timed out or its connection was lost (another
rank is the cause), a kernel of this rank failed (this rank is), or a call of CUDA does not return.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zero2all.base.package_data import read_package_table
from zero2all.base.processes import read_text
from zero2all.base.redact import redact

CONNECTION_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset)|closed by (remote )?peer|broken pipe|connectFullMesh|"
    r"connection refused|remote process exited|NCCL communicator was aborted|ncclRemoteError|"
    r"NET/\w+ ?: Got completion from peer .{0,300} with (error|status)|NET/OFI Request .{0,300} completed with error|"
    r"failed to recv, got 0 bytes",
    re.IGNORECASE,
)
_WORK = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<sent>\d+), NumelOut=(?P<received>\d+))?, Timeout\(ms\)=\d+\) ran for (?P<ms>\d+) milliseconds"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(]{1,200}))?\s{0,4}(?:\((?P<name>[^)\n]{0,200})\))? Rank \d+\]"
)
_SIGNAL_OF_RANK = re.compile(r"Received a dump signal due to a collective timeout from\s+rank (\d+)")
_OWN_TIMEOUT = re.compile(r"a collective timeout from this local|Watchdog caught collective operation timeout", re.I)
_CUDA_ERROR = re.compile(r"watchdog thread terminated with exception: (CUDA error: [^\n]+)", re.IGNORECASE)
_STUCK = re.compile(r"watchdog got stuck for (\d+) seconds|Heartbeat monitor timed out", re.IGNORECASE)
_FATAL = re.compile(r"what\(\):|watchdog thread terminated|NCCL WARN|failure detected by watchdog|detected by watchdog")
_WARNING = re.compile(r"\[W\d* ")
_TIME_OF_LINE = re.compile(r"\[[EF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+) ProcessGroupNCCL")


FailureKind = Literal["crash", "out of memory", "hang", "stopped", "wrong usage", "cut off", "ended by the agent"]
"""``cut off``: the rank lost its connection to another one, which is the cause."""


@dataclass(frozen=True)
class ExitReason:
    kind: FailureKind
    description: str
    time: float = 0.0
    """When the watchdog wrote so, in seconds since the epoch; 0 if the log does not tell. The rank that noticed a
    time-out first tells where the job stood; the others end within seconds of it."""


def explain_abort(log: Sequence[str]) -> ExitReason | None:
    """The reason by the last log lines of a rank that ended by SIGABRT; None if NCCL has nothing to do with it."""
    text = "\n".join(log)
    when = _time_of(text)
    if found := _CUDA_ERROR.search(text):  # of a kernel of this rank; the watchdog is only the first to see it
        no_memory = "out of memory" in found[1].lower()
        return ExitReason("out of memory" if no_memory else "crash", f"its GPU failed: {found[1]}", when)
    if timed_out := _explain_timeout(text):
        return ExitReason("cut off", timed_out, when)
    if found := _STUCK.search(text):
        seconds = f" for {found[1]} s" if found[1] else ""
        return ExitReason("hang", f"a call of CUDA or NCCL did not return{seconds}: ended by torch's monitor", when)
    if any(_FATAL.search(line) and CONNECTION_LOST.search(line) for line in _joined(log)):
        return ExitReason("cut off", "lost its connection to another rank: ended by NCCL's watchdog", when)
    return None


def _explain_timeout(text: str) -> str | None:
    if (work := _WORK.search(text)) is not None:
        elements = f" of {int(work['sent']):,} elements" if work["sent"] else ""
        what = f"{work['op']} number {work['number']}{elements}{_group_of(text, work['number'])}"
        return f"waited {int(work['ms']) / 1000:.0f} s for another rank in {what}: ended by NCCL's watchdog"
    if (other := _SIGNAL_OF_RANK.search(text)) is not None:
        return f"ended with rank {other[1]}, whose collective timed out"
    return "waited too long for another rank: ended by NCCL's watchdog" if _OWN_TIMEOUT.search(text) else None


def _group_of(text: str, number: str) -> str:
    """The line that follows the time-out names the group, and the number of the collective again."""
    for line in text.splitlines():
        if re.search(rf"at work(?: sequence id)?: {number}\b|WorkNCCL\(SeqNum={number},", line):
            found = _GROUP.search(line)
            if found is not None:
                return f" of group {found['name'] or found['guid'] or found['id']}"
    return ""


def _joined(log: Sequence[str]) -> list[str]:
    """NCCL's own error follows in up to three lines after the one of torch. Warnings of the store say nothing: every
    rank loses it when the job ends."""
    lines = [line for line in log if not _WARNING.search(line)]
    return [" ".join(lines[first : first + 4]) for first in range(len(lines))]


def _time_of(text: str) -> float:
    found = _TIME_OF_LINE.search(text)
    if found is None:
        return 0.0
    month, day, hour, minute, second = (int(part) for part in found.groups()[:5])
    now = time.localtime()
    year = now.tm_year - (month > now.tm_mon)  # lines have no year; one of December is read in January
    fraction = float(f"0.{found[6]}")
    try:
        return time.mktime((year, month, day, hour, minute, second, 0, 0, -1)) + fraction
    except (ValueError, OverflowError):
        return 0.0


USAGE_ERROR_STATUS = 2
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|MemoryError|Cannot allocate memory", re.IGNORECASE)
_TIME_OUT = re.compile(r"timed out waiting|collective operation timeout|wait timeout|DistStoreError", re.IGNORECASE)
_MEANINGS = read_package_table(__package__, "exit_statuses.toml")
_STATUSES = {int(status): meaning for status, meaning in _MEANINGS["statuses"].items()}
_SIGNALS: dict[int, str] = {signal.Signals[name]: meaning for name, meaning in _MEANINGS["signals"].items()}


def classify_exit(status: int, message: str, *, oom_killed: bool = False, log: Sequence[str] = ()) -> ExitReason:
    """``status`` as a shell (137) or Python (-9) reports it; ``message`` is the error of the rank, if it wrote one.

    ``log`` has its last lines.
    """
    number = _signal_number(status)
    if number == signal.SIGABRT and (found := explain_abort(log)) is not None:
        return replace(found, description=f"{found.description} (exit status 134)")
    if number == signal.SIGKILL and oom_killed:
        return ExitReason("out of memory", "killed by the kernel: the memory limit was reached (exit status 137)")
    if number is not None:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        words = f": {_SIGNALS[number]}" if number in _SIGNALS else ""
        return ExitReason("crash", f"{name} (exit status {128 + number}){words}")
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
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            files = [Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")]
        elif not controllers:
            files = [Path(f"/sys/fs/cgroup{path}/memory.events"), Path("/sys/fs/cgroup/memory.events")]
        else:
            continue
        for file in files:
            if found := re.search(r"^oom_kill (\d+)", read_text(file), re.MULTILINE):
                return int(found[1])
    return 0


def read_error_file(error_file: Path) -> tuple[str, str, float]:
    """Message, traceback and time from the error file of a rank, if it wrote one, without what libraries were given."""
    try:
        message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        text, trace = redact(message["message"]), redact(message["extraInfo"]["py_callstack"])
        return text, trace, error_file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", 0.0
