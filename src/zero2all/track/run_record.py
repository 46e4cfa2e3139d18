"""An append-only run record, one JSON object per line, readable while it is written and after any crash.

A line is ``{"step": 12, "time": …, "loss": …}``, ``{"event": "resume", "step": 10}``, ``{"sample": "zh", "step": 10,
"text": …}`` or ``{"histogram": "grad", "step": 10, "counts": […], "edges": […]}``. Several lines of one step are
merged. After a start or resume at step k the steps from k on are written again, and only the later lines count. A
truncated last line is skipped. Rank r > 0 writes its own record, ``record.rank<r>.jsonl``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from zero2all.track.record_index import Indexer, entry_to_json, index_path
from zero2all.track.record_lines import (
    EventLine,
    HistogramLine,
    InvalidLineError,
    LineReader,
    RecordLine,
    SampleLine,
    StepLine,
    is_within_line_limit,
    line_to_json,
    parse_index_entry,
    parse_record_line,
    restart_step,
)
from zero2all.track.sinks import POLL_SECONDS, AsyncWriter, Sink, sink_writer
from zero2all.track.system_metrics import SystemMonitor

SYSTEM_METRICS_SECONDS = 10.0
MAX_WRITES_PER_SECOND = 100  # of all ranks but the first together, to a file system that they share


class RunRecord:
    """The record of a run: metrics of every step, events, generated samples and histograms, as JSON lines.

    >>> with RunRecord(Path("runs/quickstart/run/record.jsonl")) as record:
    ...     record.step(0, loss=8.3, lr=1e-4)
    ...     record.sample(0, "zh", "床前明月光")

    No call waits for a disk or raises: a thread writes. ``flush`` returns whether everything is written. Of ``ranks``
    ranks those after the first write less often the more they are, and leave it to the system when a disk has it.
    """

    def __init__(
        self,
        path: Path,
        rank: int = 0,
        sinks: Sequence[Sink] = (),
        system_every: float | None = SYSTEM_METRICS_SECONDS,
        ranks: int = 1,
    ) -> None:
        self.path = path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        file = RunRecordWriter(self.path, sync_events=rank == 0)
        every = POLL_SECONDS if rank == 0 else max(POLL_SECONDS, ranks / MAX_WRITES_PER_SECOND)
        self._writers = [AsyncWriter(f"the run record {self.path}", file.write, file.close, retry=True, every=every)]
        for sink in sinks:
            self._writers.append(AsyncWriter(f"the sink {type(sink).__name__}", sink_writer(sink), sink.close))
        self._last_step = 0
        self._closed = threading.Event()
        if system_every is not None:
            threading.Thread(
                target=self._record_system_metrics, args=(system_every,), name="z2a-system", daemon=True
            ).start()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, step: int, /, **values: float) -> None:
        """Metrics of a step. A name such as ``loss/zh`` is the loss of the source zh."""
        self._last_step = step
        self._put(StepLine(step, round(time.time(), 3), values))

    def event(self, event: str, /, **details: Any) -> None:
        """An event: a start or resume, a checkpoint, a spike, a change of stage."""
        line = EventLine(event, round(time.time(), 3), details)
        if (step := restart_step(line)) is not None:
            self._last_step = step
        self._put(line)

    def sample(self, step: int, name: str, text: str) -> None:
        self._put(SampleLine(name, step, round(time.time(), 3), text))

    def histogram(self, step: int, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``, as numpy and torch give them."""
        self._put(HistogramLine(name, step, round(time.time(), 3), list(counts), list(edges)))

    def flush(self, timeout: float = 1.0) -> bool:
        """Whether every line so far is handed to the operating system, where a killed process cannot lose it."""
        return self._writers[0].flush(timeout)

    def has_unwritten_lines(self, timeout: float = 5.0) -> bool:
        """Whether lines are still pending after ``timeout`` seconds. Dropped lines do not count."""
        return not self.flush(timeout) and self._writers[0].pending > 0

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            for writer in self._writers:
                writer.close()

    def _put(self, line: RecordLine) -> None:
        if not self._closed.is_set():
            for writer in self._writers:
                writer.put(line)

    def _record_system_metrics(self, every: float) -> None:
        monitor = SystemMonitor()
        while not self._closed.wait(every):
            metrics = monitor.read()
            self._put(StepLine(self._last_step, round(time.time(), 3), metrics))


class RunRecordWriter:
    """Writes a record and its index, on the record's own thread. What a full disk did not take stays buffered."""

    def __init__(self, path: Path, *, sync_events: bool = True) -> None:
        self._path, self._sync_events = path, sync_events
        self._file: AppendFile | None = None
        self._index: AppendFile | None = None
        self._indexer = Indexer()
        self._names: tuple[str, ...] = ()
        self._buffered_lines = 0  # lines that a failed call buffered: the next call begins with them

    def write(self, lines: list[RecordLine]) -> None:
        if self._file is None or self._index is None:
            self._file, self._index = self._open()
        for line in lines[self._buffered_lines :]:
            encoded = _encode(line_to_json(line))
            start = self._file.put(encoded)
            if is_within_line_limit(encoded):
                self._add_to_index(self._index, line, start, start + len(encoded))
            self._buffered_lines += 1
        self._file.write()
        self._index.write()
        self._buffered_lines = 0
        if self._sync_events and any(isinstance(line, EventLine) for line in lines):
            self._file.sync()

    def close(self) -> None:
        for file in (self._file, self._index):
            if file is not None:
                file.close()

    def _open(self) -> tuple[AppendFile, AppendFile]:
        """Open both files, and bring the index up to date with the record."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file, index = AppendFile(self._path), AppendFile(index_path(self._path))
        indexed_bytes, valid_bytes = _valid_index_prefix(index_path(self._path))
        if indexed_bytes > file.size:  # the index of another record
            indexed_bytes, valid_bytes = 0, 0
        if valid_bytes < index.size:  # the rest is truncated or damaged: rebuild it from the record
            index.truncate(valid_bytes)
        self._indexer = Indexer(indexed_bytes)
        for start, end, line in _valid_lines(self._path, indexed_bytes):
            self._add_to_index(index, line, start, end)
        return file, index

    def _add_to_index(self, index: AppendFile, line: RecordLine, start: int, end: int) -> None:
        entry = self._indexer.add(line, start, end)
        if entry is not None:
            index.put(_encode(entry_to_json(entry, self._names)))
            self._names = entry.names if entry.lines else self._names


class AppendFile:
    """An append-only file with a buffer: ``write`` writes what the disk takes, the rest stays pending."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.size = os.fstat(self._descriptor).st_size
        self.pending = bytearray()
        if self.size and os.pread(self._descriptor, 1, self.size - 1) != b"\n":
            self.put(b"\n")  # end a line that a crash truncated, so that ours starts on its own

    def put(self, data: bytes) -> int:
        """Buffer ``data``. Returns the offset of its first byte."""
        start = self.size
        self.pending += data
        self.size += len(data)
        return start

    def write(self) -> None:
        while self.pending:
            written = os.write(self._descriptor, self.pending)
            del self.pending[:written]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self.size = size
        self.pending.clear()

    def close(self) -> None:
        os.close(self._descriptor)


def _valid_index_prefix(index: Path) -> tuple[int, int]:
    """How many bytes of the record the index covers without a gap, and the length of that part of the index."""
    indexed_bytes, valid_bytes = 0, 0
    names: tuple[str, ...] = ()
    with open(index, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        for _, end, raw in LineReader().read_lines(_range_reader(stream), size):
            try:
                entry = parse_index_entry(raw, names)
            except InvalidLineError:
                break
            if entry.at[0] != indexed_bytes:
                break
            indexed_bytes, valid_bytes, names = entry.at[1], end, entry.names
    return indexed_bytes, valid_bytes


def _valid_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, RecordLine]]:
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        for first, end, raw in LineReader(start).read_lines(_range_reader(stream), size):
            try:
                yield first, end, parse_record_line(raw)
            except InvalidLineError:
                continue  # z2a watch counts and reports it


def _range_reader(stream: BinaryIO) -> Callable[[int, int], bytes]:
    def read(start: int, length: int) -> bytes:
        stream.seek(start)
        return stream.read(length)

    return read


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_to_json_value).encode() + b"\n"


def _to_json_value(value: Any) -> Any:
    """Numpy and torch scalars as numbers; anything else as its string."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


def read_record_lines(path: Path) -> Iterator[RecordLine]:
    """The valid lines of a record; lines that a crash truncated or another program wrote are skipped."""
    return (line for _, _, line in _valid_lines(path))


def read_steps(path: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, in step order; recomputed steps replace the earlier ones."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_record_lines(path):
        if isinstance(line, StepLine):
            steps[line.step] = {**steps.get(line.step, {}), **line.metrics}
        elif (restart := restart_step(line)) is not None:
            steps = {step: metrics for step, metrics in steps.items() if step < restart}
    return dict(sorted(steps.items()))
