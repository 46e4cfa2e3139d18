"""Find the processes that a test has started, directly or not: they carry its mark in their environment."""

from __future__ import annotations

import time
from pathlib import Path

MARK = "Z2A_TEST_MARK"
SECONDS = 120.0  # agents of Ray look for their cluster for a minute


def marked(mark: str) -> dict[int, str]:
    """Processes that were started with ``Z2A_TEST_MARK=<mark>``, by pid, with their command lines."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (OSError, UnicodeDecodeError):
            continue  # it has just ended
    return found


def gone(mark: str) -> None:
    """Wait until none is left."""
    deadline = time.monotonic() + SECONDS
    while left := marked(mark):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
