"""A memory limit that the kernel enforces with a kill: a control group (cgroup). Needs root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP_V1, CGROUP_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def cgroup_unavailable_reason() -> str | None:
    if os.access(CGROUP_V1, os.W_OK) or (os.access(CGROUP_V2, os.W_OK) and (CGROUP_V2 / "cgroup.controllers").exists()):
        return None
    return "no cgroup can be created here"


@contextmanager
def memory_limit(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that puts a process, and every child it starts from then on, under the limit."""
    is_v1 = CGROUP_V1.exists()
    group = (CGROUP_V1 if is_v1 else CGROUP_V2) / f"z2a-{name.replace(' ', '-')}-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(size))
        yield lambda pid: _write(group / "cgroup.procs", str(pid))
    finally:
        group.rmdir()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
