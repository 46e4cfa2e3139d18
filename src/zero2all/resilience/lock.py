"""One trainer in a run directory at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.errors import UsageError
from zero2all.resilience.beat import has_agent

PATIENCE = 5.0  # seconds: ranks that start again may meet the last moments of those they replace
OF_AGENTS = 180.0  # a node that was cut off from the others holds on until its own agent notices


@contextmanager
def locked(directory: Path, patience: float | None = None) -> Iterator[None]:
    """Hold ``directory``. The system lets go when the process dies, however it dies, so no lock is ever stale."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if patience is None:
            patience = OF_AGENTS if has_agent() else PATIENCE
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another trainer works in {directory} ({_holder(descriptor)}): wait for it, stop it, or give "
                        "this one a new place (out=DIR)"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError):
        return "it does not say which"
