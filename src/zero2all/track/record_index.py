"""The index of a record: the byte range of each chunk of steps, and the min, mean and max of its metrics.

A record of a million steps is too long to read for one chart. ``record.index.jsonl`` grows with it, one line per chunk
of 64 step lines: ``{"at": [start, end], "lines": 64, "steps": [first, last], "times": [...], "names": [...],
"min": [...], "mean": [...], "max": [...], "others": [...]}``. A chunk without ``names`` has those of the previous one.
``others`` are its events in full, and the name, step and byte range of samples and histograms. A start or resume always
begins a chunk, so that steps which are recomputed later can be skipped. The index covers the record from its first byte
without a gap; it can be deleted at any time, and is rebuilt from the record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero2all.track.record_lines import NON_METRIC_KEYS, is_number, is_restart, is_step

CHUNK_LINES = 64


def index_path(record: Path) -> Path:
    return record.with_name(f"{record.stem}.index.jsonl")


@dataclass
class ChunkSummary:
    """Aggregates the step lines of a chunk."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        self.steps.append(line["step"])
        self.times.append(line.get("time", 0.0))
        for name, value in line.items():
            if name not in NON_METRIC_KEYS and is_number(value) and math.isfinite(value):
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
            "min": [_round_for_display(min(column)) for column in columns],
            "mean": [_round_for_display(_mean(column)) for column in columns],
            "max": [_round_for_display(max(column)) for column in columns],
        }


class Indexer:
    """Takes the lines of a record in order and returns an index entry whenever a chunk is full."""

    def __init__(self, offset: int = 0) -> None:
        self.indexed_bytes = offset
        self._summary = ChunkSummary()
        self._other_lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any], start: int, end: int) -> dict[str, Any] | None:
        """``line`` is at bytes [start, end)."""
        entry = self._close(start) if is_restart(line) and start > self.indexed_bytes else None
        if is_step(line):
            self._summary.add(line)
        else:
            self._other_lines.append(_pointer(line, start, end))
        if entry is None and (len(self._summary.steps) >= CHUNK_LINES or len(self._other_lines) >= CHUNK_LINES):
            entry = self._close(end)
        return entry

    def _close(self, end: int) -> dict[str, Any]:
        entry = {"at": [self.indexed_bytes, end], **self._summary.as_entry()}
        if self._other_lines:
            entry["others"] = self._other_lines
        self.indexed_bytes, self._summary, self._other_lines = end, ChunkSummary(), []
        return entry


def _pointer(line: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    for kind in ("sample", "histogram"):
        if kind in line:
            return {kind: line[kind], "step": line.get("step"), "at": [start, end]}
    return {**line, "at": [start, end]}


def _mean(column: list[float]) -> float:
    try:
        return math.fsum(column) / len(column)
    except OverflowError:  # each value is finite, their sum is not
        return math.fsum(value / len(column) for value in column)


def _round_for_display(value: float) -> float:
    """Six digits are more than a chart shows, and take half the bytes."""
    return float(f"{value:.6g}")
