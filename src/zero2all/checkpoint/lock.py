"""One trainer in a run directory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.base.directory_lock import LockUser, lock_directory
from zero2all.base.environment import has_agent
from zero2all.base.workspace import NEW_RUN_COMMAND

LOCK_PATIENCE = 5.0  # seconds: restarted ranks may overlap with those they replace
AGENT_LOCK_PATIENCE = 180.0  # a partitioned node holds the lock until its own agent notices


@contextmanager
def run_lock(directory: Path, patience: float | None = None) -> Iterator[None]:
    """Lock the directory of a run. The lock of a process that died is never in the way."""
    if patience is None:
        patience = AGENT_LOCK_PATIENCE if has_agent() else LOCK_PATIENCE
    with lock_directory(directory, LockUser("trainer", directory, NEW_RUN_COMMAND), patience):
        yield
