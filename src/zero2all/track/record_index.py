"""The index of a record: the byte range of each chunk of steps, and the min, mean and max of its metrics.

A record of a million steps is too long to read for one chart. ``record.index.jsonl`` grows with it, one line per chunk
of 64 step lines: ``{"at": [start, end], "lines": 64, "steps": [first, last], "times": [...], "names": [...],
"min": [...], "mean": [...], "max": [...], "others": [...]}``. A chunk without ``names`` has the previous names.
``others`` are its events in full, and the name, step and byte range of samples and histograms. A start or resume always
begins a chunk, so that steps which are recomputed later can be skipped. The index covers the record from its first byte
without a gap; it can be deleted at any time, and is rebuilt from the record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero2all.track.record_lines import (
    ByteRange,
    EventLine,
    HistogramLine,
    IndexEntry,
    LoggedLine,
    RecordLine,
    SampleLine,
    StepLine,
    is_number,
    line_to_json,
    restart_step,
)

CHUNK_LINES = 64


def index_path(record: Path) -> Path:
    return record.with_name(f"{record.stem}.index.jsonl")


@dataclass
class ChunkSummary:
    """Aggregates the step lines of a chunk."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, line: StepLine) -> None:
        self.steps.append(line.step)
        self.times.append(line.time or 0.0)
        for name, value in line.metrics.items():
            if is_number(value) and math.isfinite(value):  # a writer may pass anything
                self.values.setdefault(name, []).append(value)

    def entry(self, at: ByteRange) -> IndexEntry:
        if not self.steps:
            return IndexEntry(at)
        columns = list(self.values.values())
        return IndexEntry(
            at,
            lines=len(self.steps),
            steps=(min(self.steps), max(self.steps)),
            times=(min(self.times), max(self.times)),
            names=tuple(self.values),
            min=[_round_for_display(min(column)) for column in columns],
            mean=[_round_for_display(_mean(column)) for column in columns],
            max=[_round_for_display(max(column)) for column in columns],
        )


class Indexer:
    """Takes the lines of a record in order and returns an index entry whenever a chunk is full."""

    def __init__(self, offset: int = 0) -> None:
        self.indexed_bytes = offset
        self._summary = ChunkSummary()
        self._others: list[tuple[EventLine | LoggedLine, ByteRange]] = []

    def add(self, line: RecordLine, start: int, end: int) -> IndexEntry | None:
        """``line`` is at bytes [start, end)."""
        if isinstance(line, StepLine):
            entry = None
            self._summary.add(line)
        else:
            entry = self._close(start) if restart_step(line) is not None and start > self.indexed_bytes else None
            self._others.append((indexed_line(line), (start, end)))
        if entry is None and (len(self._summary.steps) >= CHUNK_LINES or len(self._others) >= CHUNK_LINES):
            entry = self._close(end)
        return entry

    def _close(self, end: int) -> IndexEntry:
        entry = replace(self._summary.entry((self.indexed_bytes, end)), others=self._others)
        self.indexed_bytes, self._summary, self._others = end, ChunkSummary(), []
        return entry


def indexed_line(line: EventLine | SampleLine | HistogramLine) -> EventLine | LoggedLine:
    match line:
        case EventLine():
            return line
        case SampleLine():
            return LoggedLine("sample", line.sample, line.step)
        case HistogramLine():
            return LoggedLine("histogram", line.histogram, line.step)


def entry_to_json(entry: IndexEntry, previous_names: tuple[str, ...]) -> dict[str, Any]:
    """The keys of an entry in their order in the file."""
    columns = vars(entry) if entry.lines else {"at": entry.at, "lines": 0}
    left_out = {"others"} | ({"names"} if entry.names == previous_names else set())
    values = {name: value for name, value in columns.items() if name not in left_out}
    return {**values, "others": [_other_to_json(*other) for other in entry.others]} if entry.others else values


def _other_to_json(line: EventLine | LoggedLine, at: ByteRange) -> dict[str, Any]:
    if isinstance(line, EventLine):
        return {**line_to_json(line), "at": at}
    return {line.kind: line.name, "step": line.step, "at": at}


def _mean(column: list[float]) -> float:
    try:
        return math.fsum(column) / len(column)
    except OverflowError:  # each value is finite, their sum is not
        return math.fsum(value / len(column) for value in column)


def _round_for_display(value: float) -> float:
    """Round to six digits, which are more than a chart shows and take half the bytes."""
    return float(f"{value:.6g}")
