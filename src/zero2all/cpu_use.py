"""Sharing the CPU: how much of it other programs use, and how OpenMP's threads wait for each other beside them.

Speed and MFU of a busy machine say little about the code.

torch's libgomp lets a thread spin 300,000 times at a barrier before it sleeps: 4.3 ms on the machine of our benchmarks.
On a core of its own that costs nothing. Beside other work the thread that it waits for may not run at all, and is
kept from its core by the one that spins. Longer than most gaps between two operations is enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

NOTICEABLE_SHARE = 0.2  # of the cores; less is the noise of a system


class _CpuTimes(NamedTuple):
    """Seconds so far, over the cores that this process may use."""

    total: float
    busy: float
    own: float


class OtherCpuUse:
    """
    >>> others = OtherCpuUse()
    >>> others.share()  # of the cores that this process may use, since the last call
    0.03
    """

    def __init__(self) -> None:
        self._last = _read_cpu_times()

    def share(self) -> float | None:
        """None if the system does not report it. The ranks that run beside this one count as this program."""
        before, self._last = self._last, _read_cpu_times()
        if before is None or self._last is None or self._last.total <= before.total:
            return None
        total, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(1.0, max(0.0, (busy - ranks * own) / total))


def busy_note(share: float | None) -> str:
    """For a log line: empty if others used next to nothing, or it is unknown."""
    return "" if share is None or share < NOTICEABLE_SHARE else f"other programs used {100 * share:.0f}% of the CPU"


def _read_cpu_times(path: Path = Path("/proc/stat")) -> _CpuTimes | None:
    try:
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        # user, nice, system, idle, iowait, irq, softirq, steal; what follows is in user already.
        counts = [[int(field) for field in row[1:9]] for row in rows if row and row[0] in cores]
    except (OSError, ValueError, AttributeError):
        return None
    total, idle = sum(map(sum, counts)), sum(count[3] + count[4] for count in counts)
    return _CpuTimes(total / ticks, (total - idle) / ticks, time.process_time())


SPIN_COUNT = "3000"  # 43 us there; python -m benchmarks cpu_threads compares others
USER_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to an environment, unless it already sets how threads wait."""
    return {} if any(name in environment for name in USER_VARIABLES) else {"GOMP_SPINCOUNT": SPIN_COUNT}


def limit_openmp_spinning() -> None:
    """For this process and its children. libgomp reads the variable when torch is imported, so call this first."""
    os.environ.update(spin_settings(os.environ))
