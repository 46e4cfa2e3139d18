"""What shows the progress of a rank: its heartbeat, and how far its device is.

The heartbeat is a few bytes of a memory-mapped file, which the agent polls. A page that two processes map outlives
either of them and costs the writer nothing, so every step writes a heartbeat.

The host launches work far ahead of the device, so its stack does not tell what the device is stuck in. But the step
timer records an event on the stream that computes wherever another part of the step begins. The last of them that has
completed is where the device is. Another thread asks for it when the job hangs, and does not wait for the device.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Protocol

from zero2all.base.environment import AGENT_DIR_VARIABLE, has_agent

_LAYOUT = struct.Struct("<qqd5d")


class StartupPhase(IntEnum):
    """Phases of a start, each with its time in the heartbeat."""

    IMPORTED = 0
    JOINED = 1  # the process group is initialized
    LOADED = 2  # model, optimizer and checkpoint are loaded
    STEPPED = 3  # the first step is done
    ENDING = 4  # no more steps: final saving has no step deadline


@dataclass(frozen=True)
class HeartbeatStatus:
    """What an agent reads."""

    step: int
    """Steps done, -1 if unknown."""
    first_step: int
    """``step`` after the first step of this process. An agent that polls late sees a later ``step``."""
    time: float
    """When the last heartbeat was."""
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
            self._write(status.step, done, now, status.phase_times)
            self.record_phase(StartupPhase.STEPPED)
            status = self.read()
        self._write(done, status.first_step, now, status.phase_times)

    def record_phase(self, phase: StartupPhase, done: int | None = None) -> None:
        """``done`` is the step of the loaded state: a failure from now on counts as one after that step."""
        status, now = self.read(), time.monotonic()
        phase_times = tuple(now if number == phase else before for number, before in enumerate(status.phase_times))
        self._write(status.step if done is None else done, status.first_step, now, phase_times)

    def ping(self) -> None:
        """Show that a long operation makes progress: it is not a step, but no hang either."""
        status = self.read()
        self._write(status.step, status.first_step, time.monotonic(), status.phase_times)

    def _write(self, step: int, first_step: int, when: float, phase_times: tuple[float, ...]) -> None:
        # Not with pack_into, which fills the page with zeros first: an agent that reads them sees a hang.
        self._page[:] = _LAYOUT.pack(step, first_step, when, *phase_times)

    def read(self) -> HeartbeatStatus:
        step, first_step, when, *phase_times = _LAYOUT.unpack_from(self._page)
        return HeartbeatStatus(step, first_step, when, tuple(phase_times))

    def set_run_directory(self, run_directory: Path) -> None:
        """The agent writes its reports there."""
        if self.path is not None:
            run_directory_file(self.path.parent).write_text(str(run_directory.absolute()), encoding="utf-8")


_own_heartbeat = cache(Heartbeat.from_environment)


def beat(step: int | None = None) -> None:
    """Report a step. Call it after every step of a script under ``z2a launch -- python script.py``.

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
    """Called by the agent before the rank is started."""
    path = heartbeat_path(directory, local_rank)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_LAYOUT.pack(-1, -1, time.monotonic(), *[0.0] * len(StartupPhase)))
    fresh.replace(path)  # a rank of the previous round keeps its own page
    return Heartbeat(path)


def heartbeat_path(directory: Path, local_rank: int) -> Path:
    return directory / f"beat-{local_rank}"


def run_directory_file(directory: Path) -> Path:
    return directory / "run"


def find_run_directory(directory: Path) -> Path | None:
    """The run directory, which the agent knows once a rank has set it."""
    file = run_directory_file(directory)
    return Path(file.read_text(encoding="utf-8")) if file.exists() else None


WATCHED_STEPS = 3  # a host is at most two steps ahead


class DeviceEvent(Protocol):
    """An event of torch.cuda, or one like it."""

    def query(self) -> bool: ...


@dataclass(frozen=True)
class DevicePosition:
    """What a device has begun and not finished."""

    part: str
    """The part of a step, as in ``time/*`` of the record."""
    step: int
    micro_batch: int
    """Counted from 0."""
    seconds: float
    """Seconds since the host launched it."""

    def __str__(self) -> str:
        return f"{self.part} of micro-batch {self.micro_batch} of step {self.step}, launched {self.seconds:.0f} s ago"


@dataclass
class _Step:
    number: int
    micro_batch: int = -1
    marks: list[tuple[str, int, float, DeviceEvent]] = field(default_factory=list)


class DeviceWatch:
    """The marks of the last steps.

    >>> watch.begin_step(12)
    >>> watch.add("forward", event)  # recorded on the stream that computes
    >>> watch.position()  # from any thread
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=WATCHED_STEPS)
        self._host_waits_since: float | None = None

    def begin_step(self, number: int) -> None:
        self._steps.append(_Step(number))

    def add(self, part: str, event: DeviceEvent) -> None:
        """Where ``part`` begins; what came before ends there."""
        if not self._steps:
            return
        step = self._steps[-1]
        if part == "forward":
            last = step.marks[-1][0] if step.marks else ""
            step.micro_batch += last not in ("forward", "communication", "loss")  # which are inside a forward pass
        step.marks.append((part, max(0, step.micro_batch), self._clock(), event))

    def position(self) -> DevicePosition | None:
        """What the device is in; None if it has finished all that was launched, or nothing is watched."""
        marks = [(step.number, *mark) for step in list(self._steps) for mark in list(step.marks)]
        before = None
        for number, part, micro_batch, launched, event in reversed(marks):
            if event.query():
                break
            before = (number, part, micro_batch, launched)
        else:
            return None if before is None else self._at(before)  # all are behind what the device is in
        return None if before is None else self._at((number, part, micro_batch, launched))

    def _at(self, mark: tuple[int, str, int, float]) -> DevicePosition:
        number, part, micro_batch, launched = mark
        return DevicePosition(part, number, micro_batch, self._clock() - launched)

    @contextmanager
    def host_waits(self) -> Iterator[None]:
        """A context for code in which the host waits for the device: it is not stuck itself."""
        before, self._host_waits_since = self._host_waits_since, self._clock()
        try:
            yield
        finally:
            self._host_waits_since = before

    def is_host_waiting(self) -> bool:
        return self._host_waits_since is not None


DEVICE_WATCH = DeviceWatch()
"""The device watch of this process."""
