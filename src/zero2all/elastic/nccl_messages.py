"""What NCCL and torch's watchdog over it write to the log of a rank before they end it.

A rank that waits in a collective of NCCL cannot raise an error in Python. Its watchdog thread ends the process by
SIGABRT instead, for three reasons with different causes: a collective timed out or its connection was lost (another
rank is the cause), a kernel of this rank failed (this rank is), or a call of CUDA does not return.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class WatchdogFinding:
    """Why the watchdog ended a rank."""

    kind: Literal["cut off", "crash", "out of memory", "hang"]
    description: str
    time: float = 0.0
    """When it wrote so, in seconds since the epoch; 0 if its lines have no time. The rank that noticed a time-out first
    tells where the job stood; the others end within seconds of it."""


def explain_abort(log: Sequence[str]) -> WatchdogFinding | None:
    """From the last lines of the log of a rank that ended by SIGABRT; None if NCCL has nothing to do with it."""
    text = "\n".join(log)
    when = _time_of(text)
    if found := _CUDA_ERROR.search(text):  # of a kernel of this rank; the watchdog is only the first to see it
        no_memory = "out of memory" in found[1].lower()
        return WatchdogFinding("out of memory" if no_memory else "crash", f"its GPU failed: {found[1]}", when)
    if timed_out := _explain_timeout(text):
        return WatchdogFinding("cut off", timed_out, when)
    if found := _STUCK.search(text):
        seconds = f" for {found[1]} s" if found[1] else ""
        return WatchdogFinding(
            "hang", f"a call of CUDA or NCCL did not return{seconds}: ended by torch's monitor", when
        )
    if any(_FATAL.search(line) and CONNECTION_LOST.search(line) for line in _joined(log)):
        return WatchdogFinding("cut off", "lost its connection to another rank: ended by NCCL's watchdog", when)
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
