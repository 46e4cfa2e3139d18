"""Hang detection: where every rank is stuck, and which rank the others wait for."""

from __future__ import annotations

import linecache
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero2all.elastic.flight_recorder import (
    NCCL_PREFIX,
    RecordedCollective,
    current_collective,
    pending_on_device,
    read_collectives,
)
from zero2all.elastic.heartbeat import HeartbeatStatus
from zero2all.elastic.worker import collectives_path, dump_request_path, stacks_path

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
    """Of the process in the kernel: ``T`` is stopped, ``D`` waits for a device."""
    line: str
    """The innermost frame outside of libraries."""
    waits: bool
    """Whether it is in a collective, which ends only when all ranks have joined."""
    collective: str
    """The collective that it is in, or the last one that it began, from torch's flight recorder."""
    stack: str


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
            if all(
                _has_stacks(directory, local) and _has_collectives(directory, local) for local in pids.keys() - stopped
            ):
                break
        time.sleep(0.01)
    found = []
    for local, pid in pids.items():
        stack = _read(stacks_path(directory, local)) or _py_spy(pid)
        main = _main_thread(stack)
        collectives = read_collectives(_read(collectives_path(directory, local)))
        begun = str(current_collective(collectives) or "")
        line, waits = _own_line(main), waits_in_collective(main, collectives)
        found.append(HungRank(ranks[local], statuses[local].step, states[local], line, waits, begun, stack))
    return found


def waits_in_collective(main_thread: str, collectives: list[RecordedCollective]) -> bool:
    """Whether a rank waits for others, by the stack of its main thread and its flight recorder.

    A host waits inside a collective of gloo. Those of NCCL run on the device, and the host is wherever it next
    needs a result: waiting is then what the device does. If it has completed all of them, the host or a kernel of
    this rank is stuck. Without a record of NCCL's collectives, a host that waits for its device counts as waiting.
    """
    if _COLLECTIVE.search(_innermost(main_thread)) or pending_on_device(collectives):
        return True
    on_device = any(one.profiling_name.startswith(NCCL_PREFIX) for one in collectives)
    return not on_device and _waits_for_device(main_thread)


def _waits_for_device(thread: str) -> bool:
    innermost = _FRAME.search(thread)
    if innermost is None:
        return False
    source = linecache.getline(innermost["file"], int(innermost["line"]))
    return bool(_HOST_SYNC.search(f"{innermost['file']}\n{source}"))


def find_hang_culprits(hung: list[HungRank]) -> list[tuple[HungRank, str]]:
    """The ranks that the others wait for, and why; none if all are in the same state."""
    rules = (
        ("is stopped (state T): something sent it SIGSTOP", [one for one in hung if one.state == "T"]),
        ("waits for a device (state D): a disk or a card does not answer", [one for one in hung if one.state == "D"]),
        ("is not in the collective that the others wait in", [one for one in hung if not one.waits]),
        ("is in another collective than the others", _minority(hung, [one.collective for one in hung])),
        ("is at another step than the others", _minority(hung, [str(one.step) for one in hung])),
    )
    for why, found in rules:
        if 0 < len(found) < len(hung) or (found and found[0].state == "T"):
            return [(one, why) for one in found]
    return []


def _minority(hung: list[HungRank], views: list[str]) -> list[HungRank]:
    counts = Counter(views)
    if len(counts) < 2:
        return []
    rarest = min(counts, key=lambda view: counts[view])
    return [one for one, view in zip(hung, views, strict=True) if view == rarest]


def _state(pid: int) -> str:
    found = re.search(r"^State:\s+(\S)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1].upper() if found else "?"


def request_dump(directory: Path, local: int) -> None:
    """Ask a rank to dump its collectives."""
    with suppress(OSError):  # nobody listens yet: the rank is still starting
        os.close(os.open(dump_request_path(directory, local), os.O_WRONLY | os.O_NONBLOCK))


def _has_stacks(directory: Path, local: int) -> bool:
    return "most recent call first" in _read(stacks_path(directory, local))


def _has_collectives(directory: Path, local: int) -> bool:
    return collectives_path(directory, local).exists()


def _py_spy(pid: int) -> str:
    """From outside, if it is installed: for a rank that does not answer."""
    if (program := shutil.which("py-spy")) is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
