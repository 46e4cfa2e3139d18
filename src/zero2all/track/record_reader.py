"""Follows one record file by byte offset: chunks from its index as far as that goes, the rest line by line."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from zero2all.track.record_index import ChunkSummary, Indexer, indexed_line
from zero2all.track.record_lines import (
    ByteRange,
    EventLine,
    HistogramLine,
    IndexEntry,
    InvalidLineError,
    LineReader,
    LoggedLine,
    RecordLine,
    SampleLine,
    StepLine,
    parse_index_entry,
    parse_record_line,
    restart_step,
)
from zero2all.track.run_locations import RunLocation

Array = NDArray[np.float64]
MAX_RAW_BYTES = 16 * 2**20  # a longer range is plotted from its chunk summaries
MAX_BYTES_PER_REFRESH = 256 * 2**20  # the rest of a record that grows without end is read at the next refresh
MAX_INDEX_BYTES = 2**30
MAX_RECENT_LINES = 2000  # kept for live pages
MAX_CACHED_CHUNKS = 2048  # chunks whose rows are cached


@dataclass(frozen=True, eq=False)
class RecordChunk:
    """A byte range [start, end) of a record and the summary of its step lines: [min, mean, max] of each metric."""

    byte_range: ByteRange
    lines: int
    steps: tuple[int, int]
    times: tuple[float, float]
    names: tuple[str, ...]
    values: Array  # [3, names]
    truncated_at_step: int | None = None  # steps from here on are recomputed later in the record


@dataclass(frozen=True)
class MetricTable:
    """Rows in step order, one column per metric, NaN where a row has no value. ``low`` and ``high`` if downsampled."""

    steps: Array
    times: Array
    mean: dict[str, Array]
    low: dict[str, Array] | None = None
    high: dict[str, Array] | None = None


@dataclass
class RecentLines:
    """The newest lines that were read after the index, numbered in reading order."""

    sequence: int = 0  # number of the newest line
    _numbered: deque[tuple[int, RecordLine]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_LINES))

    def add(self, line: RecordLine) -> None:
        self.sequence += 1
        self._numbered.append((self.sequence, line))

    def after(self, sequence: int) -> list[RecordLine]:
        return [line for number, line in list(self._numbered) if number > sequence]


class RecordReader:
    """
    >>> reader = RecordReader(LocalRunLocation(Path("runs/first/run")), "record.jsonl")
    >>> reader.refresh(reader.location.file_sizes())
    >>> reader.table(["loss"]).mean["loss"]
    """

    def __init__(self, location: RunLocation, file: str) -> None:
        self.location, self.file = location, file
        self._reset()

    def _reset(self) -> None:
        self.chunks: list[RecordChunk] = []
        self.tail_lines: list[StepLine] = []
        self.names: dict[str, None] = {}  # in order of first appearance
        self.events: list[EventLine] = []
        self.pointers: dict[LoggedLine, ByteRange] = {}
        self.recent = RecentLines()
        self.skipped_lines = 0  # invalid lines
        self.damage: dict[str, str] = {}  # by file: where the first invalid line is, and why
        self._reader = LineReader()
        self._indexer: Indexer | None = None
        self._cache: OrderedDict[RecordChunk, MetricTable] = OrderedDict()
        self._newest_chunks: dict[str, RecordChunk] | None = None  # of each metric; None after chunks were discarded
        self._newest_chunk_values: dict[RecordChunk, dict[str, float]] = {}

    def refresh(self, sizes: dict[str, int]) -> bool:
        """Read what was written since the last call. Returns whether there was anything."""
        size = sizes.get(self.file, 0)
        if size < self._reader.offset:  # the file was replaced
            self._reset()
        if self._indexer is None:
            indexed_bytes = self._load_index(sizes.get(self.index_file, 0), size)
            self._reader, self._indexer = LineReader(indexed_bytes), Indexer(indexed_bytes)
        before = self._reader.offset
        for start, end, raw in self._reader.read_lines(self._read, min(size, before + MAX_BYTES_PER_REFRESH)):
            try:
                self._add_line(parse_record_line(raw), start, end)
            except InvalidLineError as error:
                self.skipped_lines += 1
                self.damage.setdefault(self.file, f"byte {start}: {error}")
        return self._reader.offset > before

    @property
    def index_file(self) -> str:
        return self.file.removesuffix(".jsonl") + ".index.jsonl"

    @property
    def read_offset(self) -> int:
        return self._reader.offset

    def _read(self, start: int, length: int) -> bytes:
        return self.location.read(self.file, start, length)

    @property
    def last_step(self) -> int | None:
        steps = [chunk.steps[1] for chunk in self.chunks[-1:]] + [line.step for line in self.tail_lines]
        return max(steps) if steps else None

    @property
    def last_time(self) -> float | None:
        """Time of the newest line, whatever it records."""
        lines: list[StepLine | EventLine] = [*self.tail_lines, *self.events[-1:]]
        times = [chunk.times[1] for chunk in self.chunks[-1:]] + [line.time for line in lines if line.time is not None]
        return max(times, default=None)

    def latest_values(self) -> dict[str, float]:
        """The newest value of each metric, NaN and infinities included.

        Reads the chunks that have them, at most ``MAX_RAW_BYTES``; of a chunk before those it gives the mean.
        """
        if self._newest_chunks is None:
            self._newest_chunks = {}
            for chunk in self.chunks:
                self._newest_chunks.update(dict.fromkeys(chunk.names, chunk))
        # The last one whatever its names are: a chunk is not listed for a metric that is NaN in all of its lines.
        wanted = sorted({*self._newest_chunks.values(), *self.chunks[-1:]}, key=lambda chunk: chunk.byte_range)
        known, self._newest_chunk_values, budget = self._newest_chunk_values, {}, MAX_RAW_BYTES
        for chunk in reversed(wanted):
            budget -= chunk.byte_range[1] - chunk.byte_range[0]
            if chunk in known:
                self._newest_chunk_values[chunk] = known[chunk]
            elif budget >= 0:
                lines = self._chunk_lines(chunk)
                self._newest_chunk_values[chunk] = {
                    name: value for line in lines for name, value in line.metrics.items()
                }
        values: dict[str, float] = {}
        for chunk in wanted:
            means = dict(zip(chunk.names, chunk.values[1].tolist(), strict=True))
            values.update(self._newest_chunk_values.get(chunk, means))
        for line in self.tail_lines:
            values.update(line.metrics)
        return values

    def table(self, names: list[str], first: float = -np.inf, last: float = np.inf, points: int = 10**9) -> MetricTable:
        """The metrics ``names`` of the steps in [first, last], downsampled to about ``points`` rows."""
        chunks = [chunk for chunk in self.chunks if chunk.steps[1] >= first and chunk.steps[0] <= last]
        tail = _lines_to_table(self.tail_lines, names)
        if sum(chunk.byte_range[1] - chunk.byte_range[0] for chunk in chunks) <= MAX_RAW_BYTES:
            table = _slice_steps(
                _concat_tables([*(self._chunk_rows(chunk) for chunk in chunks), tail], names), first, last
            )
            return downsample(table, points)
        tail = _slice_steps(tail, first, last)
        return downsample(_chunks_to_table(chunks, names, tail), points)

    def step_times(self) -> tuple[Array, Array]:
        """Steps and their times: the first and last of each chunk, then every tail line."""
        ends = [end for chunk in self.chunks for end in zip(chunk.steps, chunk.times, strict=True)]
        ends += [(line.step, line.time or 0.0) for line in self.tail_lines]
        steps, times = np.array(ends, dtype=np.float64).reshape(-1, 2).T
        return steps, times

    def read_logged_line(self, logged: LoggedLine) -> SampleLine | HistogramLine | None:
        """A sample or histogram in full."""
        if (byte_range := self.pointers.get(logged)) is None:
            return None
        try:
            line = parse_record_line(self._read(byte_range[0], byte_range[1] - byte_range[0]))
        except InvalidLineError:  # the index points to it, but it is invalid
            return None
        return line if isinstance(line, SampleLine | HistogramLine) else None

    def _load_index(self, index_size: int, size: int) -> int:
        """Add the chunks of the index as far as they are valid. Returns how many bytes of the record they cover."""
        names: tuple[str, ...] = ()
        indexed_bytes = 0
        stop = min(index_size, MAX_INDEX_BYTES)
        lines = LineReader().read_lines(lambda start, length: self.location.read(self.index_file, start, length), stop)
        for start, _, raw in lines:
            try:
                entry = parse_index_entry(raw, names)
            except InvalidLineError as error:
                self.damage[self.index_file] = f"byte {start}: {error}"
                break  # read the record itself from here on
            if entry.at[0] != indexed_bytes or entry.at[1] > size:
                break  # the index of another record
            names, indexed_bytes = entry.names, entry.at[1]
            self._add_chunk(entry)
        return indexed_bytes

    def _add_line(self, line: RecordLine, start: int, end: int) -> None:
        assert self._indexer is not None
        self.recent.add(line)
        entry = self._indexer.add(line, start, end)
        if isinstance(line, StepLine):
            self.tail_lines.append(line)
        if entry is not None:
            self._add_chunk(replace(entry, others=[]))  # already added line by line
            lines, self.tail_lines = self.tail_lines, []
            if lines and self.chunks:
                self._cache_rows(self.chunks[-1], _lines_to_table(lines, None))
        if isinstance(line, StepLine):
            for name in line.metrics:
                self.names.setdefault(name)
        else:
            self._add_other_line(indexed_line(line), (start, end))

    def _add_chunk(self, entry: IndexEntry, truncated_at_step: int | None = None) -> None:
        for other, byte_range in entry.others:
            self._add_other_line(other, byte_range)
        if entry.lines:
            values = np.array([entry.min, entry.mean, entry.max], dtype=np.float64)
            self.chunks.append(
                RecordChunk(entry.at, entry.lines, entry.steps, entry.times, entry.names, values, truncated_at_step)
            )
            self.names.update(dict.fromkeys(entry.names))
            if self._newest_chunks is not None:
                self._newest_chunks.update(dict.fromkeys(entry.names, self.chunks[-1]))

    def _add_other_line(self, line: EventLine | LoggedLine, byte_range: ByteRange) -> None:
        if isinstance(line, LoggedLine):
            self.pointers[line] = byte_range
            return
        if (step := restart_step(line)) is not None:
            self._discard_from(step)
        self.events.append(line)

    def _discard_from(self, step: int) -> None:
        """Discard the steps that a restart at ``step`` recomputes."""
        self._newest_chunks = None
        self.tail_lines = [line for line in self.tail_lines if line.step < step]
        while self.chunks and self.chunks[-1].steps[0] >= step:
            self.chunks.pop()
        if self.chunks and self.chunks[-1].steps[1] >= step:
            truncated = replace(self.chunks.pop(), truncated_at_step=step)
            summary = ChunkSummary()
            for line in self._chunk_lines(truncated):
                summary.add(line)
            self._add_chunk(summary.entry(truncated.byte_range), truncated_at_step=step)
        self.pointers = {line: byte_range for line, byte_range in self.pointers.items() if line.step <= step}

    def _chunk_lines(self, chunk: RecordChunk) -> list[StepLine]:
        start, end = chunk.byte_range
        stop_step = np.inf if chunk.truncated_at_step is None else chunk.truncated_at_step
        lines = []
        for _, _, raw in LineReader(start).read_lines(self._read, end):
            try:
                line = parse_record_line(raw)
            except InvalidLineError:
                continue  # counted when it was first read
            if isinstance(line, StepLine) and line.step < stop_step:
                lines.append(line)
        return lines

    def _chunk_rows(self, chunk: RecordChunk) -> MetricTable:
        rows = self._cache.get(chunk)
        return rows if rows is not None else self._cache_rows(chunk, _lines_to_table(self._chunk_lines(chunk), None))

    def _cache_rows(self, chunk: RecordChunk, rows: MetricTable) -> MetricTable:
        self._cache[chunk] = rows
        while len(self._cache) > MAX_CACHED_CHUNKS:
            self._cache.popitem(last=False)
        return rows


def _lines_to_table(lines: list[StepLine], names: list[str] | None) -> MetricTable:
    """Lines as columns, of ``names`` or of all metrics; several lines of one step are merged into one row."""
    merged: dict[int, StepLine] = {}
    for line in lines:
        known = merged.get(line.step)
        merged[line.step] = line if known is None else replace(known, metrics={**known.metrics, **line.metrics})
    rows = [merged[step] for step in sorted(merged)]
    wanted = names or dict.fromkeys(name for row in rows for name in row.metrics)
    return MetricTable(
        np.array([row.step for row in rows], dtype=np.float64),
        np.array([row.time or 0.0 for row in rows], dtype=np.float64),
        {name: np.array([float(row.metrics.get(name, np.nan)) for row in rows]) for name in wanted},
    )


def _concat_tables(tables: list[MetricTable], names: list[str]) -> MetricTable:
    def column(table: MetricTable, name: str) -> Array:
        values = table.mean.get(name)
        return values if values is not None else np.full(len(table.steps), np.nan)

    return MetricTable(
        np.concatenate([table.steps for table in tables]),
        np.concatenate([table.times for table in tables]),
        {name: np.concatenate([column(table, name) for table in tables]) for name in names},
    )


def _slice_steps(table: MetricTable, first: float, last: float) -> MetricTable:
    keep = (table.steps >= first) & (table.steps <= last)
    return MetricTable(
        table.steps[keep], table.times[keep], {name: column[keep] for name, column in table.mean.items()}
    )


def _chunks_to_table(chunks: list[RecordChunk], names: list[str], tail: MetricTable) -> MetricTable:
    """One row per chunk, then the tail."""
    columns = {name: np.full((3, len(chunks)), np.nan) for name in names}
    start = 0
    while start < len(chunks):  # consecutive chunks with the same names at once
        stop, chunk_names = start, chunks[start].names
        while stop < len(chunks) and chunks[stop].names == chunk_names:
            stop += 1
        values = np.stack([chunk.values for chunk in chunks[start:stop]], axis=-1)  # [3, names, chunks]
        for name in names:
            if name in chunk_names:
                columns[name][:, start:stop] = values[:, chunk_names.index(name)]
        start = stop
    steps = np.array([sum(chunk.steps) / 2 for chunk in chunks])
    times = np.array([sum(chunk.times) / 2 for chunk in chunks])
    low, mean, high = (
        {name: np.concatenate([columns[name][row], tail.mean[name]]) for name in names} for row in range(3)
    )
    return MetricTable(np.concatenate([steps, tail.steps]), np.concatenate([times, tail.times]), mean, low, high)


def downsample(table: MetricTable, points: int) -> MetricTable:
    """Reduce a table to ``points`` rows, each the min, mean and max of a bin: no spike is lost."""
    rows = len(table.steps)
    if rows <= points:
        return table
    starts = np.unique(np.linspace(0, rows, points, endpoint=False).astype(int))
    sizes = np.diff([*starts, rows])

    def mean(column: Array) -> Array:
        count = np.add.reduceat(np.isfinite(column).astype(float), starts)
        with np.errstate(over="ignore"):  # a mean that overflows is shown as missing
            total = np.add.reduceat(np.nan_to_num(column, nan=0.0, posinf=0.0, neginf=0.0), starts)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    low, high = table.low or table.mean, table.high or table.mean
    return MetricTable(
        np.add.reduceat(table.steps, starts) / sizes,
        np.add.reduceat(table.times, starts) / sizes,
        {name: mean(column) for name, column in table.mean.items()},
        {name: np.fmin.reduceat(column, starts) for name, column in low.items()},
        {name: np.fmax.reduceat(column, starts) for name, column in high.items()},
    )
