"""Heartbeat of a rank: a few bytes of a memory-mapped file, which its agent polls.

A page that two processes map outlives either of them and costs the writer nothing, so every step writes a heartbeat.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

from zero2all.environment import AGENT_DIR_VARIABLE, has_agent

_LAYOUT = struct.Struct("<qd5d")


class StartupPhase(IntEnum):
    """Phases of a start, each with its time in the heartbeat."""

    IMPORTED = 0
    JOINED = 1  # the process group is initialized
    LOADED = 2  # model, optimizer and checkpoint are loaded
    STEPPED = 3  # the first step is done
    ENDING = 4  # no more steps: final saving has no step deadline


@dataclass(frozen=True)
class HeartbeatStatus:
    """What an agent reads: steps done (-1 if unknown), time of the last heartbeat, time of each phase."""

    step: int
    time: float
    phase_times: tuple[float, ...]

    @property
    def has_stepped(self) -> bool:
        return self.phase_times[StartupPhase.STEPPED] > 0

    @property
    def is_stepping(self) -> bool:
        """Whether the next heartbeat is due within a step."""
        return self.has_stepped and not self.phase_times[StartupPhase.ENDING]


class Heartbeat:
    """
    >>> heartbeat = Heartbeat.from_environment()
    >>> heartbeat.record_phase(StartupPhase.LOADED)
    >>> heartbeat(done=12)  # after every step

    Times are of ``time.monotonic``, which on Linux all processes of a machine share. Without an agent nobody reads it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is None:
            self._page = mmap.mmap(-1, _LAYOUT.size)
        else:
            with open(path, "r+b") as stream:
                self._page = mmap.mmap(stream.fileno(), _LAYOUT.size)

    @classmethod
    def from_environment(cls) -> Heartbeat:
        return cls(
            heartbeat_path(Path(os.environ[AGENT_DIR_VARIABLE]), int(os.environ["LOCAL_RANK"])) if has_agent() else None
        )

    def __call__(self, done: int) -> None:
        status, now = self.read(), time.monotonic()
        if not status.has_stepped:
            self.record_phase(StartupPhase.STEPPED)
            status = self.read()
        self._write(done, now, status.phase_times)

    def record_phase(self, phase: StartupPhase, done: int | None = None) -> None:
        """``done`` is the step of the loaded state: a failure from now on counts as one after that step."""
        status, now = self.read(), time.monotonic()
        phase_times = tuple(now if number == phase else before for number, before in enumerate(status.phase_times))
        self._write(status.step if done is None else done, now, phase_times)

    def ping(self) -> None:
        """Not a step, but no hang either: for long operations."""
        status = self.read()
        self._write(status.step, time.monotonic(), status.phase_times)

    def _write(self, step: int, when: float, phase_times: tuple[float, ...]) -> None:
        # Not with pack_into, which fills the page with zeros first: an agent that reads them sees a hang.
        self._page[:] = _LAYOUT.pack(step, when, *phase_times)

    def read(self) -> HeartbeatStatus:
        step, when, *phase_times = _LAYOUT.unpack_from(self._page)
        return HeartbeatStatus(step, when, tuple(phase_times))

    def set_run_directory(self, run_directory: Path) -> None:
        """The agent writes its reports there."""
        if self.path is not None:
            run_directory_file(self.path.parent).write_text(str(run_directory.absolute()), encoding="utf-8")


@cache
def _own_heartbeat() -> Heartbeat:
    return Heartbeat.from_environment()


def beat(step: int | None = None) -> None:
    """For a script under ``z2a launch -- python script.py``: call it after every step.

    >>> beat(step=12)

    From the first step on, ``--hang-after`` seconds without a call are a hang, and reports and restarts know the step.
    Without a step it says that a long operation, such as saving, makes progress. Without a launcher it does nothing.
    """
    heartbeat = _own_heartbeat()
    if step is None:
        heartbeat.ping()
        return
    if not heartbeat.read().has_stepped:  # a script does not tell when it joined and loaded
        for phase in (StartupPhase.JOINED, StartupPhase.LOADED):
            heartbeat.record_phase(phase)
    heartbeat(done=step)


def create_heartbeat(directory: Path, local_rank: int) -> Heartbeat:
    """On the agent's side, before the rank is started."""
    path = heartbeat_path(directory, local_rank)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_LAYOUT.pack(-1, time.monotonic(), *[0.0] * len(StartupPhase)))
    fresh.replace(path)  # a rank of the previous round keeps its own page
    return Heartbeat(path)


def heartbeat_path(directory: Path, local_rank: int) -> Path:
    return directory / f"beat-{local_rank}"


def run_directory_file(directory: Path) -> Path:
    return directory / "run"


def find_run_directory(directory: Path) -> Path | None:
    """Known to the agent once a rank has set it."""
    file = run_directory_file(directory)
    return Path(file.read_text(encoding="utf-8")) if file.exists() else None
