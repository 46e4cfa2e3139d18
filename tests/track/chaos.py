"""Ways for a record to go wrong during a run, shared by the test and the benchmark."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.track.browser import watching
from zero2all.track import RunRecord

KILL_AT = 50
OnStep = Callable[[int], None]


class NoRecord:
    """Logging off."""

    def __init__(self, path: Path, **options: Any) -> None: ...
    def __enter__(self) -> NoRecord:
        return self

    def __exit__(self, *error: object) -> None: ...
    def step(self, step: int, **values: float) -> None: ...
    def event(self, event: str, **details: Any) -> None: ...
    def sample(self, step: int, name: str, text: str) -> None: ...
    def histogram(self, step: int, name: str, counts: Sequence[float], edges: Sequence[float]) -> None: ...
    def flush(self) -> bool:
        return True

    def has_unwritten_lines(self) -> bool:
        return False


class Raising:
    """A sink that raises on every call."""

    def __init__(self, directory: Path | None = None) -> None: ...

    def _raise(self, *values: object) -> None:
        raise ConnectionError("Broken pipe")

    step = event = sample = histogram = _raise

    def close(self) -> None:
        self._raise()


@contextmanager
def small_disk(location: Path, options: str) -> Iterator[Path]:
    """A file system of 64 KiB of its own; needs the right to mount."""
    location.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", location], check=True, capture_output=True)
    try:
        yield location
    finally:
        subprocess.run(["umount", "-l", location], check=True)


def may_mount() -> bool:
    if os.geteuid() != 0:
        return False
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    return probe.returncode == 0


@contextmanager
def chaos(kind: str, work: Path) -> Iterator[OnStep]:
    """The train loop under a fault; the yielded function is to be called at every step."""
    with ExitStack() as stack:
        on_step: OnStep = lambda step: None  # noqa: E731
        maker: Callable[..., Any] = RunRecord
        if kind == "off":
            maker = NoRecord
        elif kind == "disk full":
            disk = stack.enter_context(small_disk(work / "full", "size=64k"))
            (disk / "ballast").write_bytes(bytes(60 * 1024))  # so that it is full after a few steps
            maker = functools.partial(_elsewhere, disk / "record.jsonl")
        elif kind == "read-only":
            disk = stack.enter_context(small_disk(work / "readonly", "ro"))
            maker = functools.partial(_elsewhere, disk / "record.jsonl")
        elif kind == "sink raises":
            maker = _with_raising_sink
        elif kind == "viewer killed":
            run = work / "viewed" / "run"
            run.mkdir(parents=True, exist_ok=True)
            (run / "record.jsonl").write_bytes(b"")
            _, viewer = stack.enter_context(watching(run))
            maker = functools.partial(_elsewhere, run / "record.jsonl")

            def on_step(step: int) -> None:
                if step == KILL_AT:
                    viewer.send_signal(signal.SIGKILL)

        stack.enter_context(patch("zero2all.train.recording.RunRecord", maker))
        yield on_step


def _elsewhere(location: Path, path: Path, **options: Any) -> RunRecord:
    return RunRecord(location, **options)


def _with_raising_sink(path: Path, **options: Any) -> RunRecord:
    return RunRecord(path, **{**options, "sinks": [Raising()]})


KINDS = ("off", "on", "disk full", "read-only", "sink raises", "viewer killed")
NEEDS_MOUNT = ("disk full", "read-only")
EXPECTED_WARNINGS = {
    "disk full": ("No space left on device", "lines are lost"),
    "read-only": ("Read-only file system", "lines are lost"),
    "sink raises": ("Broken pipe", "lines are lost"),
}
