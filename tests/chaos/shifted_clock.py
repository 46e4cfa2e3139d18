"""A wall clock that jumps, for all Python code of a process; the monotonic clock does not, as after a step of NTP.

In Python and not with libfaketime, which makes Python's ``time.sleep`` fail.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

CLOCK_VARIABLE = "Z2A_CHAOS_CLOCK"  # path of a file with the seconds by which the clock is ahead


def shift_clock() -> None:
    """Before other imports, which may keep a reference to ``time.time``."""
    if (path := os.environ.get(CLOCK_VARIABLE)) is None:
        return
    read_time, offset = time.time, Path(path)

    def shifted_time() -> float:
        return read_time() + float(offset.read_text())

    time.time = shifted_time
    time.time_ns = lambda: int(shifted_time() * 1e9)


def set_clock(path: Path, ahead: float) -> None:
    new = path.with_suffix(".new")
    new.write_text(str(ahead))
    new.replace(path)  # nobody reads half a number
