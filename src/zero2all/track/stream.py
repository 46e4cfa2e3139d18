"""One record file, followed by byte offset: its chunks from the index as far as that goes, the rest line by line."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.track.index import Indexer, Summary
from zero2all.track.lines import (
    NOT_VALUES,
    BadLine,
    LineReader,
    index_entry,
    is_number,
    is_restart,
    is_step,
    record_line,
)
from zero2all.track.places import Place

Array = NDArray[np.float64]
RAW = 16 * 2**20  # a range of up to so many bytes is read whole, a longer one is drawn from its chunks
PER_LOOK = 256 * 2**20  # of a record that grows without end, or says so, there is more to read at the next look
LARGEST_INDEX = 2**30
RECENT = 2000  # lines kept for pages that follow
CACHED = 2048  # chunks whose rows stay in memory


@dataclass(frozen=True, eq=False)
class Chunk:
    """Bytes [first, after) of a record and what their step lines come to: values are [min, mean, max] by name."""

    at: tuple[int, int]
    lines: int
    steps: tuple[int, int]
    times: tuple[float, float]
    names: tuple[str, ...]
    values: Array  # [3, names]
    before: int | None = None  # steps from here on were done again later


@dataclass(frozen=True)
class Table:
    """Rows in order of steps, one column a name, NaN where a row has no value. ``low`` and ``high`` where reduced."""

    steps: Array
    times: Array
    mean: dict[str, Array]
    low: dict[str, Array] | None = None
    high: dict[str, Array] | None = None


class Stream:
    """
    >>> stream = Stream(LocalPlace(Path("runs/first/run")), "record.jsonl")
    >>> stream.refresh(place.sizes())
    >>> stream.table(["loss"]).mean["loss"]
    """

    def __init__(self, place: Place, file: str) -> None:
        self.place, self.file = place, file
        self.index_file = file.removesuffix(".jsonl") + ".index.jsonl"
        self._reset()

    def _reset(self) -> None:
        self.chunks: list[Chunk] = []
        self.open_lines: list[dict[str, Any]] = []
        self.names: dict[str, None] = {}  # in the order in which they came up
        self.events: list[dict[str, Any]] = []
        self.pointers: dict[tuple[str, str, int], tuple[int, int]] = {}  # (kind, name, step) -> bytes
        self.recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT)
        self.sequence = 0  # lines seen past the index; ``recent`` is numbered by it
        self.skipped = 0  # lines that could not be used
        self.damage: dict[str, str] = {}  # by file, where that began and why
        self._reader = LineReader()
        self._indexer: Indexer | None = None
        self._cache: OrderedDict[Chunk, Table] = OrderedDict()

    def refresh(self, sizes: dict[str, int]) -> bool:
        """Take in what was written since the last call; whether there was anything."""
        size = sizes.get(self.file, 0)
        if size < self._reader.at:  # another file under the same name
            self._reset()
        if self._indexer is None:
            covered = self._take_index(sizes.get(self.index_file, 0), size)
            self._reader, self._indexer = LineReader(covered), Indexer(covered)
        before = self._reader.at
        for first, after, raw in self._reader.lines(self._read, min(size, before + PER_LOOK)):
            try:
                self._add_line(record_line(raw), first, after)
            except BadLine as error:
                self.skipped += 1
                self.damage.setdefault(self.file, f"byte {first}: {error}")
        return self._reader.at > before

    @property
    def read_to(self) -> int:
        return self._reader.at

    def _read(self, start: int, length: int) -> bytes:
        return self.place.read(self.file, start, length)

    @property
    def last_step(self) -> int | None:
        steps = [chunk.steps[1] for chunk in self.chunks[-1:]] + [line["step"] for line in self.open_lines]
        return max(steps) if steps else None

    def table(self, names: list[str], first: float = -np.inf, last: float = np.inf, points: int = 10**9) -> Table:
        """The columns ``names`` of the steps in [first, last], in at most about ``points`` rows."""
        chunks = [chunk for chunk in self.chunks if chunk.steps[1] >= first and chunk.steps[0] <= last]
        tail = _rows(self.open_lines, names)
        if sum(chunk.at[1] - chunk.at[0] for chunk in chunks) <= RAW:
            table = _cut(_joined([*(self._chunk_rows(chunk) for chunk in chunks), tail], names), first, last)
            return reduced(table, points)
        tail = _cut(tail, first, last)
        return reduced(_summaries(chunks, names, tail), points)

    def milestones(self) -> tuple[Array, Array]:
        """Steps and the times at which they were done: the ends of each chunk, and the lines after them."""
        ends = [end for chunk in self.chunks for end in zip(chunk.steps, chunk.times, strict=True)]
        ends += [(line["step"], line.get("time", 0.0)) for line in self.open_lines]
        steps, times = np.array(ends, dtype=np.float64).reshape(-1, 2).T
        return steps, times

    def line(self, kind: str, name: str, step: int) -> dict[str, Any] | None:
        """A sample or histogram in full."""
        place = self.pointers.get((kind, name, step))
        try:
            return None if place is None else record_line(self._read(place[0], place[1] - place[0]))
        except BadLine:
            return None  # the index said that there was one

    def _take_index(self, index_size: int, size: int) -> int:
        """Its chunks as far as they are right; the byte of the record up to which they go."""
        names: tuple[str, ...] = ()
        covered = 0
        stop = min(index_size, LARGEST_INDEX)
        lines = LineReader().lines(lambda start, length: self.place.read(self.index_file, start, length), stop)
        for first, _, raw in lines:
            try:
                entry = index_entry(raw, names)
            except BadLine as error:
                self.damage[self.index_file] = f"byte {first}: {error}"
                break  # from here on the record itself is read
            if entry["at"][0] != covered or entry["at"][1] > size:
                break  # of another record
            names = tuple(entry["names"])
            self._add_chunk(entry)
            covered = entry["at"][1]
        return covered

    def _add_line(self, line: dict[str, Any], first: int, after: int) -> None:
        assert self._indexer is not None
        if is_step(line):
            line = {name: value for name, value in line.items() if is_number(value)}
        self.sequence += 1
        self.recent.append((self.sequence, line))
        entry = self._indexer.add(line, first, after)
        if entry is not None:
            lines = [*self.open_lines, line] if is_step(line) else self.open_lines
            self._add_chunk({**entry, "others": []})  # the others were added one by one
            self.open_lines = []
            if lines and self.chunks:
                self._keep(self.chunks[-1], _rows(lines, None))
        elif is_step(line):
            self.open_lines.append(line)
        if is_step(line):
            self.names.update(dict.fromkeys(name for name in line if name not in NOT_VALUES))
        else:
            self._add_other({**line, "at": [first, after]})

    def _add_chunk(self, entry: dict[str, Any], before: int | None = None) -> None:
        for other in entry.get("others", []):
            self._add_other(other)
        if entry["lines"]:
            values = np.array([entry["min"], entry["mean"], entry["max"]], dtype=np.float64)
            names, (at, steps, times) = tuple(entry["names"]), (entry[key] for key in ("at", "steps", "times"))
            self.chunks.append(Chunk(tuple(at), entry["lines"], tuple(steps), tuple(times), names, values, before))
            self.names.update(dict.fromkeys(names))

    def _add_other(self, line: dict[str, Any]) -> None:
        for kind in ("sample", "histogram"):
            if kind in line:
                first, after = line["at"]
                self.pointers[kind, line[kind], line["step"]] = (first, after)
                return
        if is_restart(line):
            self._forget_from(line["step"])
        self.events.append({name: value for name, value in line.items() if name != "at"})

    def _forget_from(self, step: int) -> None:
        """What a restart at ``step`` will do again."""
        self.open_lines = [line for line in self.open_lines if line["step"] < step]
        while self.chunks and self.chunks[-1].steps[0] >= step:
            self.chunks.pop()
        if self.chunks and self.chunks[-1].steps[1] >= step:
            cut = replace(self.chunks.pop(), before=step)
            summary = Summary()
            for line in self._chunk_lines(cut):
                summary.add(line)
            self._add_chunk({"at": cut.at, **summary.as_entry()}, before=step)
        self.pointers = {key: place for key, place in self.pointers.items() if key[2] <= step}

    def _chunk_lines(self, chunk: Chunk) -> list[dict[str, Any]]:
        first, after = chunk.at
        before = np.inf if chunk.before is None else chunk.before
        found = []
        for _, _, raw in LineReader(first).lines(self._read, after):
            try:
                line = record_line(raw)
            except BadLine:
                continue  # counted when it was first read
            if is_step(line) and line["step"] < before:
                found.append(line)
        return found

    def _chunk_rows(self, chunk: Chunk) -> Table:
        found = self._cache.get(chunk)
        return found if found is not None else self._keep(chunk, _rows(self._chunk_lines(chunk), None))

    def _keep(self, chunk: Chunk, rows: Table) -> Table:
        self._cache[chunk] = rows
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return rows


def _rows(lines: list[dict[str, Any]], names: list[str] | None) -> Table:
    """Lines as columns, all of them or some; several lines of one step are one row."""
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        known = merged.get(line["step"])
        merged[line["step"]] = line if known is None else {**known, **line, "time": known.get("time", 0.0)}
    rows = [merged[step] for step in sorted(merged)]
    wanted = names or dict.fromkeys(name for row in rows for name in row if name not in NOT_VALUES)
    return Table(
        np.array([row["step"] for row in rows], dtype=np.float64),
        np.array([row.get("time", 0.0) for row in rows], dtype=np.float64),
        {name: np.array([_number(row.get(name)) for row in rows], dtype=np.float64) for name in wanted},
    )


def _number(value: Any) -> float:
    return float(value) if is_number(value) else np.nan


def _joined(tables: list[Table], names: list[str]) -> Table:
    def column(table: Table, name: str) -> Array:
        found = table.mean.get(name)
        return found if found is not None else np.full(len(table.steps), np.nan)

    return Table(
        np.concatenate([table.steps for table in tables]),
        np.concatenate([table.times for table in tables]),
        {name: np.concatenate([column(table, name) for table in tables]) for name in names},
    )


def _cut(table: Table, first: float, last: float) -> Table:
    keep = (table.steps >= first) & (table.steps <= last)
    return Table(table.steps[keep], table.times[keep], {name: column[keep] for name, column in table.mean.items()})


def _summaries(chunks: list[Chunk], names: list[str], tail: Table) -> Table:
    """A row a chunk, and the lines after them."""
    columns = {name: np.full((3, len(chunks)), np.nan) for name in names}
    start = 0
    while start < len(chunks):  # stretches of chunks with the same names at once
        stop, have = start, chunks[start].names
        while stop < len(chunks) and chunks[stop].names == have:
            stop += 1
        values = np.stack([chunk.values for chunk in chunks[start:stop]], axis=-1)  # [3, names, chunks]
        for name in names:
            if name in have:
                columns[name][:, start:stop] = values[:, have.index(name)]
        start = stop
    steps = np.array([sum(chunk.steps) / 2 for chunk in chunks])
    times = np.array([sum(chunk.times) / 2 for chunk in chunks])
    low, mean, high = (
        {name: np.concatenate([columns[name][row], tail.mean[name]]) for name in names} for row in range(3)
    )
    return Table(np.concatenate([steps, tail.steps]), np.concatenate([times, tail.times]), mean, low, high)


def reduced(table: Table, points: int) -> Table:
    """At most ``points`` rows, each the smallest, mean and largest of a stretch: no spike is lost."""
    rows = len(table.steps)
    if rows <= points:
        return table
    starts = np.unique(np.linspace(0, rows, points, endpoint=False).astype(int))
    sizes = np.diff([*starts, rows])

    def mean(column: Array) -> Array:
        there = np.add.reduceat(np.isfinite(column).astype(float), starts)
        with np.errstate(over="ignore"):  # a mean that no float holds is shown as none
            total = np.add.reduceat(np.nan_to_num(column, nan=0.0, posinf=0.0, neginf=0.0), starts)
        return np.where(there > 0, total / np.maximum(there, 1), np.nan)

    low, high = table.low or table.mean, table.high or table.mean
    return Table(
        np.add.reduceat(table.steps, starts) / sizes,
        np.add.reduceat(table.times, starts) / sizes,
        {name: mean(column) for name, column in table.mean.items()},
        {name: np.fmin.reduceat(column, starts) for name, column in low.items()},
        {name: np.fmax.reduceat(column, starts) for name, column in high.items()},
    )
