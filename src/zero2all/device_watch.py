"""How far the device of a rank is, and whether its host waits for it: asked by another thread when the job hangs.

The host launches work far ahead of the device, so its stack does not tell what the device is stuck in. But the step
timer records an event on the stream that computes wherever another part of the step begins. The last of them that has
completed is where the device is. Nothing here waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

WATCHED_STEPS = 3  # a host is at most two steps ahead


class Event(Protocol):
    """Of torch.cuda, or one like it."""

    def query(self) -> bool: ...


@dataclass(frozen=True)
class DevicePosition:
    """What a device has begun and not finished."""

    part: str
    """Of a step, as in ``time/*`` of the record."""
    step: int
    micro_batch: int
    """From 0."""
    seconds: float
    """Since the host launched it."""

    def __str__(self) -> str:
        return f"{self.part} of micro-batch {self.micro_batch} of step {self.step}, launched {self.seconds:.0f} s ago"


@dataclass
class _Step:
    number: int
    micro_batch: int = -1
    marks: list[tuple[str, int, float, Event]] = field(default_factory=list)


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

    def add(self, part: str, event: Event) -> None:
        """Where ``part`` begins; what came before ends there."""
        if not self._steps:
            return
        step = self._steps[-1]
        if part == "forward":
            last = step.marks[-1][0] if step.marks else ""
            step.micro_batch += last not in ("forward", "communication", "loss")  # which are inside a forward pass
        step.marks.append((part, max(0, step.micro_batch), self._clock(), event))

    def position(self) -> DevicePosition | None:
        """None if the device has finished all that was launched, or nothing is watched."""
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
        """Around a place at which the host waits for the device: it is not stuck itself."""
        before, self._host_waits_since = self._host_waits_since, self._clock()
        try:
            yield
        finally:
            self._host_waits_since = before

    def is_host_waiting(self) -> bool:
        return self._host_waits_since is not None


DEVICE_WATCH = DeviceWatch()
"""That of this process."""
