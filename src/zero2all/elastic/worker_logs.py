"""Log files with the stderr of ranks: reading the last lines, and limiting the size."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

HEAD_BYTES, TAIL_BYTES = 1 << 20, 4 << 20  # bytes that are kept
MAX_LOG_BYTES = 16 << 20
_READ = 256 << 10  # bytes read from the end
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def last_lines(log: Path, count: int) -> list[str]:
    """Empty if there is no such file."""
    try:
        with open(log, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _READ))
            text = stream.read(_READ)
    except OSError:
        return []
    return text.decode("utf-8", errors="replace").splitlines()[-count:]


def trim_log(log: Path) -> bool:
    """Punch a hole into the middle of a log that has grown too large.

    The rank that has it open continues at its offset, so the file cannot be truncated or replaced; head and tail stay
    where they are. False if there was nothing to do, or if the file system cannot do it.
    """
    try:
        with open(log, "r+b") as stream:
            status = os.fstat(stream.fileno())
            if status.st_blocks * 512 <= MAX_LOG_BYTES:
                return False
            fallocate = ctypes.CDLL(None, use_errno=True).fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            length = status.st_size - TAIL_BYTES - HEAD_BYTES
            return bool(fallocate(stream.fileno(), _PUNCH_HOLE_KEEP_SIZE, HEAD_BYTES, length) == 0)
    except (OSError, AttributeError):
        return False
