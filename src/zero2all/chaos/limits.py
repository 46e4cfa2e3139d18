"""A limit on memory that the kernel keeps with a kill: a control group. Needs root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OLD, NEW = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def why_no_memory_limit() -> str | None:
    if os.access(OLD, os.W_OK) or (os.access(NEW, os.W_OK) and (NEW / "cgroup.controllers").exists()):
        return None
    return "no control group can be made here"


@contextmanager
def memory_limit(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that puts a process, and all that it starts from then on, under the limit."""
    old = OLD.exists()
    group = (OLD if old else NEW) / f"z2a-{name.replace(' ', '-')}-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(size))
        yield lambda pid: _write(group / "cgroup.procs", str(pid))
    finally:
        group.rmdir()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
