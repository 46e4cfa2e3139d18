"""The evaluations of a run's checkpoints: ``evals.jsonl`` beside the run record.

A line is one value: ``{"version": 1, "kind": "probes", "suite": "stories", "name": "sum-en", "step": 400, "value": 0.7,
"metric": "probability", "better": "higher", "group": "en arithmetic", "digest": …, "time": …}``. The training process
never writes this file; a lock keeps evaluations of several processes apart. Of several values of the same name and
step the last counts, and only values with the ``digest`` of the last one: those before were measured with another
definition.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from zero2all.directory_lock import NO_FLOCK_ERRNOS
from zero2all.track.record_lines import (
    MAX_TIME,
    EventLine,
    InvalidLineError,
    LineReader,
    is_count,
    is_number,
    parse_json_line,
    restart_step,
)
from zero2all.track.run_locations import EVALS_FILE, RunLocation
from zero2all.track.run_record import AppendFile
from zero2all.track.trend import holm, mann_kendall
from zero2all.units import show_bytes

VERSION = 1
MAX_NAME = 120  # characters
MAX_FILE_BYTES = 256 * 2**20  # the rest is not read
RESERVED = frozenset("/@")  # separate the parts of a metric's name


@dataclass(frozen=True, kw_only=True)
class EvalLine:
    """One value of one checkpoint."""

    version: int = VERSION
    kind: str
    """What was evaluated: ``probes``, ``loss`` or ``bench``."""
    suite: str
    name: str
    step: int
    """The number of steps that the checkpoint was trained for."""
    value: float
    metric: str
    """What the value is, such as ``probability``."""
    better: Literal["higher", "lower"]
    group: str = ""
    """Values of a group share a chart."""
    digest: str = ""
    """Of what was measured: values with different ones cannot be compared."""
    error: float | None = None
    """Half of the 95 % confidence interval."""
    time: float
    """When it was evaluated, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class EvalCurve:
    """A value over the checkpoints of a run."""

    kind: str
    suite: str
    name: str
    group: str
    metric: str
    better: Literal["higher", "lower"]
    steps: list[int]
    times: list[float]
    values: list[float]
    errors: list[float | None]
    """Half of the 95 % confidence interval of each value, if it is known."""
    tau: float | None = None
    """Kendall's tau in the direction that is better; None with fewer than three checkpoints."""
    p: float | None = None
    """Of the one-sided trend test, corrected for the number of curves in the suite."""

    @property
    def metric_name(self) -> str:
        """Its name among the metrics of the run."""
        about = ", ".join(filter(None, (self.group, self.metric)))
        return f"{self.kind}/{self.suite}: {about}/{self.name}"


def append_evals(directory: Path, lines: Iterable[EvalLine]) -> None:
    """Add lines to the evaluations of the run in ``directory``; all of them, also beside another process."""
    data = b"".join(json.dumps(asdict(line), ensure_ascii=False).encode() + b"\n" for line in lines)
    with open(directory / EVALS_FILE, "ab") as locked:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_FLOCK_ERRNOS:
                raise
        file = AppendFile(directory / EVALS_FILE)  # while it is locked: this looks at the last line
        try:
            file.put(data)
            file.write()
            file.sync()
        finally:
            file.close()


class EvalReader:
    """Follows the evaluations of a run.

    >>> reader = EvalReader(LocalRunLocation(Path("runs/first/run")))
    >>> reader.refresh(reader.location.file_sizes())
    >>> reader.curves()[0].values
    """

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self._reset()

    def _reset(self) -> None:
        self._lines: dict[tuple[str, str, str, int], EvalLine] = {}  # the last of each
        self._reader = LineReader()
        self.version = 0  # changes with every line
        self.skipped_lines = 0
        self.damage: str | None = None  # where the first invalid line is, and why
        self._curves: tuple[object, list[EvalCurve]] = (None, [])  # and what they depend on

    def refresh(self, sizes: dict[str, int]) -> bool:
        """Read what was written since the last call. Returns whether there was anything."""
        size, before = sizes.get(EVALS_FILE, 0), self._reader.offset
        if size < before:  # the file was replaced
            self._reset()
        if size > MAX_FILE_BYTES:
            self.damage = self.damage or f"only the first {show_bytes(MAX_FILE_BYTES)} are read"
        for start, _, raw in self._reader.read_lines(self._read, min(size, MAX_FILE_BYTES)):
            self.version += 1
            try:
                line = _parse_eval_line(raw)
            except InvalidLineError as error:
                self.skipped_lines += 1
                self.damage = self.damage or f"byte {start}: {error}"
                continue
            key = (line.kind, line.suite, line.name, line.step)
            self._lines.pop(key, None)  # so that the last one written is the last one here
            self._lines[key] = line
        return self._reader.offset != before

    def _read(self, start: int, length: int) -> bytes:
        return self.location.read(EVALS_FILE, start, length)

    def curves(self, events: Sequence[EventLine] = ()) -> list[EvalCurve]:
        """A curve for each name, with its trend. ``events`` of the run record tell which checkpoints it abandoned."""
        restarts = [(step, event.time or 0.0) for event in events if (step := restart_step(event)) is not None]
        key = (self.version, restarts)
        if self._curves[0] != key:
            current = [
                line
                for line in self._lines.values()
                if not any(line.step > step and line.time < time for step, time in restarts)
            ]
            self._curves = key, eval_curves(current)
        return self._curves[1]


def eval_curves(lines: Iterable[EvalLine]) -> list[EvalCurve]:
    """A curve for each name, with its trend, from lines in the order in which they were written."""
    by_name: dict[tuple[str, str, str], dict[int, EvalLine]] = {}
    for line in lines:
        by_step = by_name.setdefault((line.kind, line.suite, line.name), {})
        by_step.pop(line.step, None)  # so that the last one written is the last one here
        by_step[line.step] = line
    curves = [_to_curve(list(by_step.values())) for by_step in by_name.values()]
    return _with_trends(sorted(curves, key=lambda curve: (curve.kind, curve.suite)))


def _to_curve(lines: list[EvalLine]) -> EvalCurve:
    last = lines[-1]
    same = sorted((line for line in lines if line.digest == last.digest), key=lambda line: line.step)
    return EvalCurve(
        kind=last.kind,
        suite=last.suite,
        name=last.name,
        group=last.group,
        metric=last.metric,
        better=last.better,
        steps=[line.step for line in same],
        times=[line.time for line in same],
        values=[line.value for line in same],
        errors=[line.error for line in same],
    )


def _with_trends(curves: list[EvalCurve]) -> list[EvalCurve]:
    """With the trends of each curve; the correction is over the curves of a suite."""
    found: list[EvalCurve] = []
    for suite in dict.fromkeys((curve.kind, curve.suite) for curve in curves):
        own = [curve for curve in curves if (curve.kind, curve.suite) == suite]
        signs = [1 if curve.better == "higher" else -1 for curve in own]
        trends = [
            mann_kendall([sign * value for value in curve.values]) for sign, curve in zip(signs, own, strict=True)
        ]
        corrected = iter(holm([trend.p for trend in trends if trend is not None]))
        for curve, trend in zip(own, trends, strict=True):
            found.append(curve if trend is None else replace(curve, tau=trend.tau, p=next(corrected)))
    return found


def _parse_eval_line(raw: bytes | None) -> EvalLine:
    """A line in which every value has the expected type."""
    line = parse_json_line(raw)
    if line.get("version") != VERSION:
        raise InvalidLineError("of another version")
    for key in ("kind", "suite", "name", "metric", "group", "digest"):
        text = line.get(key, "")
        if not isinstance(text, str) or len(text) > MAX_NAME or RESERVED & set(text) or not text.isprintable():
            raise InvalidLineError(f"{key} is not a name")
        if not text and key not in ("group", "digest"):
            raise InvalidLineError(f"{key} is missing")
    if not is_count(line.get("step")):
        raise InvalidLineError("step is not an integer")
    for key in ("value", "time"):
        if not is_number(line.get(key)) or not math.isfinite(line[key]):
            raise InvalidLineError(f"{key} is not a number")
    error = line.get("error")
    if error is not None and not (is_number(error) and 0 <= error < math.inf):
        raise InvalidLineError("error is not a number")
    if abs(line["time"]) > MAX_TIME:
        raise InvalidLineError("time is not a number of seconds")
    if line.get("better") not in ("higher", "lower"):
        raise InvalidLineError("better is neither higher nor lower")
    return EvalLine(**{key: line[key] for key in EvalLine.__dataclass_fields__ if key in line})
