"""The index beside a record: what lies where, and each stretch of steps as smallest, mean and largest.

A record of a million steps is too long to read for one chart. ``record.index.jsonl`` grows with it, one line a chunk of
64 step lines: ``{"at": [first byte, byte after], "lines": 64, "steps": [first, last], "times": [...], "names": [...],
"min": [...], "mean": [...], "max": [...], "others": [...]}``. A chunk without ``names`` has those of the one before.
``others`` are the events in it, whole, and of samples and histograms the name, step and place. A start or resume always
begins a chunk, so that what was done again can be left out. The index covers the record from its first byte without a
gap; it can be removed at any time, and is made again from the record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero2all.track.lines import NOT_VALUES, is_number, is_restart, is_step

CHUNK = 64


def index_path(record: Path) -> Path:
    return record.with_name(f"{record.stem}.index.jsonl")


@dataclass
class Summary:
    """What a stretch of step lines comes to."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        self.steps.append(line["step"])
        self.times.append(line.get("time", 0.0))
        for name, value in line.items():
            if name not in NOT_VALUES and is_number(value) and math.isfinite(value):
                self.values.setdefault(name, []).append(value)

    def as_entry(self) -> dict[str, Any]:
        if not self.steps:
            return {"lines": 0}
        columns = list(self.values.values())
        return {
            "lines": len(self.steps),
            "steps": [min(self.steps), max(self.steps)],
            "times": [min(self.times), max(self.times)],
            "names": list(self.values),
            "min": [_short(min(column)) for column in columns],
            "mean": [_short(_mean(column)) for column in columns],
            "max": [_short(max(column)) for column in columns],
        }


class Indexer:
    """Takes the lines of a record in order, and gives a line of the index whenever a chunk is full."""

    def __init__(self, at: int = 0) -> None:
        self.covered = at
        self._summary = Summary()
        self._others: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any], first: int, after: int) -> dict[str, Any] | None:
        """``line`` lies at bytes [first, after)."""
        full = self._close(first) if is_restart(line) and first > self.covered else None
        if is_step(line):
            self._summary.add(line)
        else:
            self._others.append(_pointer(line, first, after))
        if full is None and (len(self._summary.steps) >= CHUNK or len(self._others) >= CHUNK):
            full = self._close(after)
        return full

    def _close(self, after: int) -> dict[str, Any]:
        entry = {"at": [self.covered, after], **self._summary.as_entry()}
        if self._others:
            entry["others"] = self._others
        self.covered, self._summary, self._others = after, Summary(), []
        return entry


def _pointer(line: dict[str, Any], first: int, after: int) -> dict[str, Any]:
    for kind in ("sample", "histogram"):
        if kind in line:
            return {kind: line[kind], "step": line.get("step"), "at": [first, after]}
    return {**line, "at": [first, after]}


def _mean(column: list[float]) -> float:
    try:
        return math.fsum(column) / len(column)
    except OverflowError:  # each value is finite, their sum is not
        return math.fsum(value / len(column) for value in column)


def _short(value: float) -> float:
    """Six digits are more than a screen shows, and half the bytes."""
    return float(f"{value:.6g}")
