"""What ranks write to stderr, in files that their agent keeps: the end of them, and a limit to their size."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

HEAD, TAIL = 1 << 20, 4 << 20  # bytes that are kept
LARGEST = 16 << 20
_READ = 64 << 10  # bytes at the end that are looked at
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def last_lines(log: Path, count: int) -> list[str]:
    """None if there is no such file."""
    try:
        with open(log, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _READ))
            text = stream.read(_READ)
    except OSError:
        return []
    return text.decode("utf-8", errors="replace").splitlines()[-count:]


def trim(log: Path) -> bool:
    """Give the middle of a log that has grown too large back to the file system.

    The rank that has it open goes on at the offset where it is, so the file cannot be cut or replaced; its head and its
    tail stay where they are. False if there was nothing to do, or if the file system cannot do it.
    """
    try:
        with open(log, "r+b") as stream:
            found = os.fstat(stream.fileno())
            if found.st_blocks * 512 <= LARGEST:
                return False
            fallocate = ctypes.CDLL(None, use_errno=True).fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            length = found.st_size - TAIL - HEAD
            return bool(fallocate(stream.fileno(), _PUNCH_HOLE_KEEP_SIZE, HEAD, length) == 0)
    except (OSError, AttributeError):
        return False
