"""A hang, explained: where every rank is stuck, and which of them the others wait for."""

from __future__ import annotations

import json
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
from typing import Any

from zero2all.resilience.beat import Pulse
from zero2all.resilience.rank import bell_path, collectives_path, stacks_path

START_UP = 5  # times as long as a step: imports, compiling, and a checkpoint to load
ANSWER = 2.0  # seconds for ranks to show where they are
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_COLLECTIVE = re.compile(r"torch/distributed/|torch/_ops\.py|_functional_collectives")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen|<string>")


@dataclass(frozen=True)
class Stuck:
    """Where one rank is."""

    rank: int
    step: int
    state: str
    """Of the process, as the kernel has it: ``T`` is stopped, ``D`` waits for a device."""
    line: str
    """The innermost line that is not a library's."""
    waits: bool
    """Whether it is in a collective, which ends only when all ranks have come."""
    collective: str
    """The last collective that it began, from torch's flight recorder."""
    stack: str


def is_stuck(pulse: Pulse, after: float) -> bool:
    return time.monotonic() - pulse.time > (after if pulse.stepping else START_UP * after)


def look(directory: Path, pids: dict[int, int], ranks: dict[int, int], pulses: dict[int, Pulse]) -> list[Stuck]:
    """Ask every process, by local rank, for its stacks and its collectives, and read what comes within two seconds."""
    states = {local: _state(pid) for local, pid in pids.items()}
    for local, pid in pids.items():
        collectives_path(directory, local).unlink(missing_ok=True)  # what was asked for earlier is old
        ring(directory, local)
        os.kill(pid, signal.SIGUSR1)
    stopped = {local for local, state in states.items() if state == "T"}
    for local in stopped:
        # The signal above has been waiting: it shows the very line at which the process was stopped.
        os.kill(pids[local], signal.SIGCONT)
    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline:
        if all(_shows_stacks(directory, local) for local in stopped):
            for local in stopped:
                os.kill(pids[local], signal.SIGSTOP)
            if all(
                _shows_stacks(directory, local) and _shows_collectives(directory, local)
                for local in pids.keys() - stopped
            ):
                break
        time.sleep(0.01)
    found = []
    for local, pid in pids.items():
        stack = _read(stacks_path(directory, local)) or _py_spy(pid)
        main = _main_thread(stack)
        begun = _last_collective(_read(collectives_path(directory, local)))
        line = _own_line(main)
        waits = bool(_COLLECTIVE.search(_innermost(main)))
        found.append(Stuck(ranks[local], pulses[local].step, states[local], line, waits, begun, stack))
    return found


def odd_ones(stuck: list[Stuck]) -> list[tuple[Stuck, str]]:
    """The ranks that the others wait for, and why they are thought so; none if all are alike."""
    rules = (
        ("is stopped (state T): something sent it SIGSTOP", [one for one in stuck if one.state == "T"]),
        ("waits for a device (state D): a disk or a card does not answer", [one for one in stuck if one.state == "D"]),
        ("is not in the collective that the others wait in", [one for one in stuck if not one.waits]),
        ("is in another collective than the others", _fewest(stuck, [one.collective for one in stuck])),
        ("is at another step than the others", _fewest(stuck, [str(one.step) for one in stuck])),
    )
    for why, found in rules:
        if 0 < len(found) < len(stuck) or (found and found[0].state == "T"):
            return [(one, why) for one in found]
    return []


def _fewest(stuck: list[Stuck], views: list[str]) -> list[Stuck]:
    counts = Counter(views)
    if len(counts) < 2:
        return []
    rarest = min(counts, key=lambda view: counts[view])
    return [one for one, view in zip(stuck, views, strict=True) if view == rarest]


def _state(pid: int) -> str:
    found = re.search(r"^State:\s+(\S)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1].upper() if found else "?"


def ring(directory: Path, local: int) -> None:
    """Ask a rank for its collectives."""
    with suppress(OSError):  # nobody listens: the rank has not come so far
        os.close(os.open(bell_path(directory, local), os.O_WRONLY | os.O_NONBLOCK))


def _shows_stacks(directory: Path, local: int) -> bool:
    return "most recent call first" in _read(stacks_path(directory, local))


def _shows_collectives(directory: Path, local: int) -> bool:
    return collectives_path(directory, local).exists()


def _py_spy(pid: int) -> str:
    """From outside, where it is installed: for a rank that does not answer."""
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
    """faulthandler writes the main thread last; it is the one whose outermost frame is the module."""
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


def _last_collective(dump: str) -> str:
    try:
        entries: list[dict[str, Any]] = json.loads(dump or "{}").get("entries", [])
    except ValueError:
        return ""
    if not entries:
        return ""
    last = entries[-1]
    return f"{last['profiling_name']} number {last['collective_seq_id']} of group {last['process_group'][1]}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
