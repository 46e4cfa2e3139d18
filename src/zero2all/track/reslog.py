"""An append-only record, one JSON object a line, readable while it is written and after any crash.

A line is ``{"step": 12, "loss": ...}`` or ``{"event": "resume", "step": 10}``. A start or resume at step k says that
the steps from k on are written again, and only the later lines count. A torn last line is skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from zero2all.console import warn


class Record:
    """
    >>> with Record(Path("runs/quickstart/run/record.jsonl")) as record:
    ...     record.step(0, loss=8.3, lr=1e-4)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: IO[bytes] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the record
            if path.stat().st_size and _last_byte(path) != b"\n":
                self._stream.write(b"\n")  # close a line that a crash tore, so that ours starts whole
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def step(self, step: int, **values: float) -> None:
        self._write({"step": step, "time": round(time.time(), 3), **values})

    def event(self, event: str, **details: Any) -> None:
        self._write({"event": event, "time": round(time.time(), 3), **details})

    def _write(self, line: dict[str, Any]) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Say it once and go on: a full disk must not cost the run."""
        warn(f"the run record {self.path} cannot be written ({error}); training goes on without it")
        self._stream = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as stream:
        for line in stream:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """The surviving history: for each step the values that count, in order of steps."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if line.get("event") in ("start", "resume"):
            steps = {step: values for step, values in steps.items() if step < line["step"]}
        elif "step" in line and "event" not in line:
            steps[line["step"]] = line
    return dict(sorted(steps.items()))


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1)
