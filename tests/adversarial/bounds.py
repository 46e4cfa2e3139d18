"""What a hostile input may cost: seconds of this thread's CPU and memory of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SECONDS = 5.0
MEMORY = 1 << 30  # bytes
NOISE = 0.25  # seconds, below which growth is not judged
T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    seconds: float
    """Of CPU: a machine that is busy with something else does not count."""
    memory: int
    """Peak bytes above what was in use before; 0 where the system does not tell."""

    @property
    def is_bounded(self) -> bool:
        return self.seconds < SECONDS and self.memory < MEMORY


def measure(function: Callable[[], T]) -> tuple[T, Cost]:
    before, begun = _reset_peak(), time.process_time()
    result = function()
    return result, Cost(time.process_time() - begun, max(0, _peak() - before))


def survives(function: Callable[[], T]) -> T:
    """The result of a call whose cost is bounded."""
    result, cost = measure(function)
    assert cost.is_bounded, cost
    return result


def _reset_peak() -> int:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _peak()


def _peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
