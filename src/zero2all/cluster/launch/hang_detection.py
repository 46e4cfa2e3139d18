"""Hang detection: where every rank is stuck, and which rank the others wait for.

A script may send no heartbeat. It is idle as long as neither it nor a descendant uses CPU time or reads or writes. A
rank that waits for NCCL may spin, but then the same collective stays pending on its device.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.base.processes import program_output, read_text
from zero2all.cluster.launch.flight_recorder import (
    GroupTrace,
    RecordedCollective,
    current_collective,
    find_causes,
    pending_on_device,
    read_collectives,
    read_device_state,
    read_group_traces,
)
from zero2all.cluster.launch.heartbeat import DevicePosition, HeartbeatStatus
from zero2all.cluster.launch.worker import (
    ABORT_REQUEST,
    collectives_path,
    dump_request_path,
    dump_thread_path,
    stacks_path,
)

STARTUP_FACTOR = 5  # multiple of the limit for a step: imports, compilation and loading a checkpoint
DUMP_TIMEOUT = 2.0  # seconds for ranks to dump their stacks
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_COLLECTIVE = re.compile(r"torch/distributed/|torch/_ops\.py|_functional_collectives|checkpoint/rank_tree\.py")
# A call in which the host waits for the device, or a module of torch that does nothing else.
_HOST_SYNC = re.compile(r"\.(tolist|item|cpu|numpy|nonzero)\(|synchronize\(|torch/cuda/(__init__|streams)\.py")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen|<string>")


@dataclass(frozen=True)
class HungRank:
    """Where one rank is stuck."""

    rank: int
    step: int
    state: str
    """The kernel's state of the process: ``T`` is stopped, ``D`` waits for a device."""
    line: str
    """The innermost frame outside of libraries."""
    waits: bool
    """Whether it is in a collective, which ends only when all ranks have joined."""
    collective: str
    """The collective that it is in, or the last one that it began, from torch's flight recorder."""
    stack: str
    groups: list[GroupTrace] = field(default_factory=list)
    """Where it is in each of its process groups."""
    device: DevicePosition | None = None
    """What its GPU has begun and not finished."""


@dataclass(frozen=True)
class HangCulprit:
    """A rank that the others wait for."""

    rank: int
    why: str
    line: str


def is_hung(status: HeartbeatStatus, after: float) -> bool:
    return time.monotonic() - status.time > (after if status.is_stepping else STARTUP_FACTOR * after)


def collect_stacks(
    directory: Path, pids: dict[int, int], ranks: dict[int, int], statuses: dict[int, HeartbeatStatus]
) -> list[HungRank]:
    """Request stacks and collectives of every process, by local rank, and read what arrives within the timeout."""
    states = {local: _state(pid) for local, pid in pids.items()}
    for local, pid in pids.items():
        collectives_path(directory, local).unlink(missing_ok=True)  # a dump of an earlier request is stale
        request_dump(directory, local)
        if stacks_path(directory, local).exists():  # else nothing handles the signal, which would end the process
            os.kill(pid, signal.SIGUSR1)
    stopped = {local for local, state in states.items() if state == "T"}
    for local in stopped:
        # The signal above is pending: it shows the line at which the process was stopped.
        os.kill(pids[local], signal.SIGCONT)
    deadline = time.monotonic() + DUMP_TIMEOUT
    while time.monotonic() < deadline:
        if all(_has_stacks(directory, local) for local in stopped):
            for local in stopped:
                os.kill(pids[local], signal.SIGSTOP)
            running = pids.keys() - stopped
            if all(_has_stacks(directory, one) and collectives_path(directory, one).exists() for one in running):
                break
        time.sleep(0.01)
    found = []
    for local, pid in pids.items():
        stack = read_text(stacks_path(directory, local)) or _py_spy(pid)
        main = _main_thread(stack)
        dump = read_text(collectives_path(directory, local))
        collectives = read_collectives(dump)
        begun = str(current_collective(collectives) or "")
        device = read_device_state(dump)
        line, waits = _own_line(main), waits_in_collective(main, collectives, host_waits=device.host_waits)
        step, groups = statuses[local].step, read_group_traces(dump)
        found.append(HungRank(ranks[local], step, states[local], line, waits, begun, stack, groups, device.position))
    return found


def waits_in_collective(main_thread: str, collectives: list[RecordedCollective], *, host_waits: bool = False) -> bool:
    """Whether a rank waits for others, by the stack of its main thread and its flight recorder.

    A host waits inside a collective of gloo. Collectives of NCCL run on the device, and the host is wherever it next
    needs a result: waiting is then what the device does. If it has completed all of them, the host or a kernel of
    this rank is stuck. Without a record of NCCL's collectives, a host that waits for its device counts as waiting:
    by ``host_waits``, which the rank has set around the places at which it does, or by its stack.
    """
    if _COLLECTIVE.search(_innermost(main_thread)) or pending_on_device(collectives):
        return True
    on_device = any(one.is_on_device for one in collectives)
    return not on_device and (host_waits or _waits_for_device(main_thread))


def _waits_for_device(thread: str) -> bool:
    innermost = _FRAME.search(thread)
    if innermost is None:
        return False
    source = linecache.getline(innermost["file"], int(innermost["line"]))
    return bool(_HOST_SYNC.search(f"{innermost['file']}\n{source}"))


def find_hang_culprits(hung: list[HungRank], *, heard_all: bool = True) -> list[HangCulprit]:
    """The ranks that the others wait for, and why; none if all are in the same state.

    ``heard_all``: whether every node has reported, so that a rank without a trace has none.
    """
    lines = {one.rank: one.line for one in hung}
    stopped = [one for one in hung if one.state == "T"]
    asleep = [one for one in hung if one.state == "D"]
    if stopped or 0 < len(asleep) < len(hung):
        why = "waits for a device (state D): a disk or a card does not answer"
        why = "is stopped (state T): something sent it SIGSTOP" if stopped else why
        return [HangCulprit(one.rank, why, one.line) for one in stopped or asleep]
    if any(trace.pending is not None for one in hung for trace in one.groups):
        causes = find_causes({one.rank: one.groups for one in hung}, heard_all=heard_all)
        named = [HangCulprit(cause.rank, cause.why, lines.get(cause.rank, "")) for cause in causes]
        return named or _culprits_by_device(hung)
    return _culprits_without_traces(hung)


def _culprits_by_device(hung: list[HungRank]) -> list[HangCulprit]:
    """All hosts have launched the same. GPUs that compute hold up those that wait in communication."""
    known = [(one, one.device) for one in hung if one.device is not None]
    computing = [(one, device) for one, device in known if device.part != "communication"]
    if len(computing) == len(known):
        return []
    return [HangCulprit(one.rank, f"has a GPU that does not finish {device}", one.line) for one, device in computing]


def _culprits_without_traces(hung: list[HungRank]) -> list[HangCulprit]:
    """The culprits by the stacks of the ranks and the last collectives that they began."""
    rules = (
        ("is not in the collective that the others wait in", [one for one in hung if not one.waits]),
        ("is in another collective than the others", _minority(hung, [one.collective for one in hung])),
        ("is at another step than the others", _minority(hung, [str(one.step) for one in hung])),
    )
    for why, found in rules:
        if 0 < len(found) < len(hung):
            return [HangCulprit(one.rank, why, one.line) for one in found]
    return []


def _minority(hung: list[HungRank], views: list[str]) -> list[HungRank]:
    counts = Counter(views)
    if len(counts) < 2:
        return []
    rarest = min(counts, key=lambda view: counts[view])
    return [one for one, view in zip(hung, views, strict=True) if view == rarest]


def _state(pid: int) -> str:
    found = re.search(r"^State:\s+(\S)", read_text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1].upper() if found else "?"


def request_dump(directory: Path, local: int) -> None:
    """Ask a rank to dump its collectives."""
    _send_request(directory, local, b"")


def request_abort(directory: Path, local: int) -> None:
    """Tell a rank that a peer is lost: if it waits for NCCL, it exits."""
    _send_request(directory, local, ABORT_REQUEST)


def _send_request(directory: Path, local: int, request: bytes) -> None:
    with suppress(OSError):  # nobody listens yet: the rank is still starting
        fifo = os.open(dump_request_path(directory, local), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fifo, request)
        finally:
            os.close(fifo)


def _has_stacks(directory: Path, local: int) -> bool:
    return "most recent call first" in read_text(stacks_path(directory, local))


def _py_spy(pid: int) -> str:
    """The stack of a rank that does not answer, if py-spy is installed."""
    return program_output("py-spy", "dump", "--nonblocking", "--pid", str(pid), timeout=10)


def _main_thread(stack: str) -> str:
    """faulthandler writes the main thread last; its outermost frame is the module."""
    threads = re.split(r"\n\s*\n", stack.strip())
    return threads[-1] if threads else ""


def _innermost(thread: str) -> str:
    """The files of the four innermost frames: a collective is called through a wrapper or two."""
    return "\n".join(found["file"] for found in list(_FRAME.finditer(thread))[:4])


def _own_line(thread: str) -> str:
    frames = list(_FRAME.finditer(thread))
    own = [found for found in frames if not _LIBRARY.search(found["file"])] or frames
    if not own:
        return "no stack: it does not answer"
    return f"{own[0]['file']}:{own[0]['line']} in {own[0]['name']}"


MIN_CPU_SHARE = 0.01  # of one core; threads that only wait use less
MIN_CPU_SECONDS = 0.02  # between two checks: the kernel counts in hundredths of a second
MAX_CHECK_INTERVAL = 30.0
CHECKS_PER_LIMIT = 10


@dataclass(frozen=True)
class _Usage:
    """What a rank and its descendants have used so far."""

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
        """The time of ``time.monotonic`` since which each local rank is idle."""
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
    """The bytes that a process has read and written, also by way of the page cache."""
    lines = read_text(process / "io").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))


def _children() -> dict[int, list[int]]:
    children = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        if fields := _stat_fields(process):
            children[int(fields[1])].append(int(process.name))
    return children


def _stat_fields(process: Path) -> list[str]:
    """The fields from the state on; the name before it may contain anything. Empty if the process has just ended."""
    return read_text(process / "stat").rpartition(")")[2].split()
