"""Hang detection for a script that sends no heartbeat: by what can be seen of its processes from outside.

A rank is idle as long as neither it nor a descendant uses CPU time or reads or writes. A rank that waits for NCCL
may spin, but then the same collective stays pending on its device.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zero2all.elastic.flight_recorder import pending_on_device, read_collectives
from zero2all.elastic.hang_detection import request_dump
from zero2all.elastic.worker import collectives_path, dump_thread_path
from zero2all.processes import read_text

MIN_CPU_SHARE = 0.01  # of one core; threads that only wait use less
MIN_CPU_SECONDS = 0.02  # between two checks: the kernel counts in hundredths of a second
MAX_CHECK_INTERVAL = 30.0
CHECKS_PER_LIMIT = 10


@dataclass(frozen=True)
class _Usage:
    """Of a rank and its descendants so far."""

    cpu: float
    io: int


@dataclass
class _RankActivity:
    checked: float
    usage: _Usage
    active: float
    """When it was last seen active."""
    pending: str = ""
    """The collective that its device has not completed."""
    pending_since: float = 0.0

    def idle_since(self) -> float:
        return min(self.active, self.pending_since) if self.pending else self.active


class ActivityWatch:
    """Samples the ranks of a node at intervals; ``idle_since`` tells when each was last active."""

    def __init__(self, directory: Path, hang_after: float) -> None:
        self.directory = directory
        self.interval = min(MAX_CHECK_INTERVAL, hang_after / CHECKS_PER_LIMIT)
        self._ranks: dict[int, _RankActivity] = {}
        self._next_check = 0.0

    def restart(self) -> None:
        """The ranks are new processes."""
        self._ranks.clear()
        self._next_check = 0.0

    def idle_since(self, pids: Mapping[int, int]) -> dict[int, float]:
        """By local rank, in times of ``time.monotonic``."""
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + self.interval
            children = _children()
            for local, pid in pids.items():
                self._check(local, _usage(self._family(pid, children), self._dump_thread(pid, local)), now)
                request_dump(self.directory, local)  # read at the next check
        return {local: self._ranks[local].idle_since() for local in pids}

    def _check(self, local: int, usage: _Usage, now: float) -> None:
        pending = self._pending(local)
        if (rank := self._ranks.get(local)) is None:
            self._ranks[local] = _RankActivity(now, usage, now, pending, now)
            return
        # A child that has ended takes its times along, so less than before is activity too.
        limit = max(MIN_CPU_SECONDS, MIN_CPU_SHARE * (now - rank.checked))
        busy = abs(usage.cpu - rank.usage.cpu) > limit
        if busy or usage.io != rank.usage.io:
            rank.active = now
        if pending != rank.pending:
            rank.pending, rank.pending_since = pending, now
        rank.checked, rank.usage = now, usage

    def _pending(self, local: int) -> str:
        dump = read_text(collectives_path(self.directory, local))
        return "".join(str(one) for one in pending_on_device(read_collectives(dump))[:1])

    def _dump_thread(self, pid: int, local: int) -> Path | None:
        """The thread of the rank that answers the agent: what it does is no progress of the script."""
        thread = read_text(dump_thread_path(self.directory, local))
        return Path(f"/proc/{pid}/task/{thread}") if thread else None

    @staticmethod
    def _family(pid: int, children: Mapping[int, list[int]]) -> list[int]:
        found = [pid]
        for one in found:  # grows as it is read
            found += children.get(one, [])
        return found


def _usage(pids: Iterable[int], without: Path | None) -> _Usage:
    directories = [Path(f"/proc/{pid}") for pid in pids]
    cpu, io = sum(map(_cpu_seconds, directories)), sum(map(_io_bytes, directories))
    return _Usage(cpu, io) if without is None else _Usage(cpu - _cpu_seconds(without), io - _io_bytes(without))


def _cpu_seconds(process: Path) -> float:
    fields = _stat_fields(process)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # user and system


def _io_bytes(process: Path) -> int:
    """Read and written, also by way of the page cache."""
    lines = read_text(process / "io").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))


def _children() -> dict[int, list[int]]:
    children = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        if fields := _stat_fields(process):
            children[int(fields[1])].append(int(process.name))
    return children


def _stat_fields(process: Path) -> list[str]:
    """From the state on; the name before it may contain anything. Empty if the process has just ended."""
    return read_text(process / "stat").rpartition(")")[2].split()
