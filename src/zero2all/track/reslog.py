"""An append-only record, one JSON object a line, readable while it is written and after any crash.

A line is ``{"step": 12, "time": …, "loss": …}``, ``{"event": "resume", "step": 10}``, ``{"sample": "zh", "step": 10,
"text": …}`` or ``{"histogram": "grad", "step": 10, "counts": […], "edges": […]}``. Several lines of one step are one
step. A start or resume at step k says that the steps from k on are written again, and only the later lines count. A
torn last line is skipped. Rank r > 0 writes a record of its own beside it, ``record.rank<r>.jsonl``.
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

from zero2all.track.index import Indexer, index_path
from zero2all.track.lines import BadLine, LineReader, fits, index_entry, is_restart, is_step, record_line
from zero2all.track.pump import Pump
from zero2all.track.sinks import Sink, hand_over
from zero2all.track.system import System

SYSTEM_EVERY = 10.0


class Record:
    """
    >>> with Record(Path("runs/quickstart/run/record.jsonl")) as record:
    ...     record.step(0, loss=8.3, lr=1e-4)
    ...     record.sample(0, "zh", "床前明月光")

    Nothing here waits for a disk or raises: a thread writes. ``flush`` says whether all of it is written.
    """

    def __init__(
        self, path: Path, rank: int = 0, sinks: Sequence[Sink] = (), system_every: float | None = SYSTEM_EVERY
    ) -> None:
        self.path = path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        file = RecordFile(self.path)
        self._pumps = [Pump(f"the run record {self.path}", file.write, file.close, retry=True)]
        for sink in sinks:
            self._pumps.append(Pump(f"the sink {type(sink).__name__}", hand_over(sink), sink.close))
        self._last_step = 0
        self._closed = threading.Event()
        if system_every is not None:
            threading.Thread(target=self._watch_system, args=(system_every,), name="z2a-system", daemon=True).start()

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, step: int, /, **values: float) -> None:
        """Values of a step. A name such as ``loss/zh`` is the channel zh of the loss."""
        self._last_step = step
        self._put({"step": step, "time": round(time.time(), 3), **values})

    def event(self, event: str, /, **details: Any) -> None:
        """Something that happened: a start or resume, a checkpoint, a spike, a change of stage."""
        line = {"event": event, "time": round(time.time(), 3), **details}
        if is_restart(line):
            self._last_step = line["step"]
        self._put(line)

    def sample(self, step: int, name: str, text: str) -> None:
        self._put({"sample": name, "step": step, "time": round(time.time(), 3), "text": text})

    def histogram(self, step: int, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``, as numpy and torch give them."""
        line = {"histogram": name, "step": step, "time": round(time.time(), 3)}
        self._put({**line, "counts": list(counts), "edges": list(edges)})

    def flush(self, timeout: float = 1.0) -> bool:
        """Whether all so far is handed to the operating system, where a killed process cannot lose it."""
        return self._pumps[0].flush(timeout)

    def lags(self, timeout: float = 5.0) -> bool:
        """Whether lines still wait to be written after so many seconds. Those that were lost do not come back."""
        return not self.flush(timeout) and self._pumps[0].waiting > 0

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            for pump in self._pumps:
                pump.close()

    def _put(self, line: dict[str, Any]) -> None:
        if not self._closed.is_set():
            for pump in self._pumps:
                pump.put(line)

    def _watch_system(self, every: float) -> None:
        system = System()
        while not self._closed.wait(every):
            figures = system.read()
            self._put({"step": self._last_step, "time": round(time.time(), 3), **figures})


class RecordFile:
    """The writing end, on the record's own thread. What a full disk did not take stays in the buffers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: AppendFile | None = None
        self._index: AppendFile | None = None
        self._indexer = Indexer()
        self._names: list[str] = []
        self._taken = 0  # lines of a failed call before that are in the buffers: the next one begins with them

    def write(self, lines: list[dict[str, Any]]) -> None:
        if self._file is None or self._index is None:
            self._file, self._index = self._open()
        for line in lines[self._taken :]:
            encoded = _encode(line)
            first = self._file.put(encoded)
            if fits(encoded):
                self._add_to_index(self._index, line, first, first + len(encoded))
            self._taken += 1
        self._file.write()
        self._index.write()
        self._taken = 0
        if any("event" in line for line in lines):
            self._file.sync()

    def close(self) -> None:
        for file in (self._file, self._index):
            if file is not None:
                file.close()

    def _open(self) -> tuple[AppendFile, AppendFile]:
        """Both files, and what the record holds beyond its index taken into that."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file, index = AppendFile(self._path), AppendFile(index_path(self._path))
        covered, good = _covered(index_path(self._path))
        if covered > file.size:  # of another record
            covered, good = 0, 0
        if good < index.size:  # the rest is torn or damaged: it is made again from the record
            index.truncate(good)
        self._indexer = Indexer(covered)
        for first, after, line in _checked_lines(self._path, covered):
            self._add_to_index(index, line, first, after)
        return file, index

    def _add_to_index(self, index: AppendFile, line: dict[str, Any], first: int, after: int) -> None:
        entry = self._indexer.add(line, first, after)
        if entry is None:
            return
        if entry.get("names") == self._names:
            del entry["names"]
        self._names = entry.get("names", self._names)
        index.put(_encode(entry))


class AppendFile:
    """Bytes are put, then written as far as the disk takes them; the rest waits."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.size = os.fstat(self._descriptor).st_size
        self.waiting = bytearray()
        if self.size and os.pread(self._descriptor, 1, self.size - 1) != b"\n":
            self.put(b"\n")  # close a line that a crash tore, so that ours starts whole

    def put(self, data: bytes) -> int:
        """The place of its first byte."""
        first = self.size
        self.waiting += data
        self.size += len(data)
        return first

    def write(self) -> None:
        while self.waiting:
            written = os.write(self._descriptor, self.waiting)
            del self.waiting[:written]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self.size = size
        self.waiting.clear()

    def close(self) -> None:
        os.close(self._descriptor)


def _covered(index: Path) -> tuple[int, int]:
    """How many bytes of the record its index covers without a gap, and how many of its own bytes that takes."""
    covered, good = 0, 0
    names: tuple[str, ...] = ()
    with open(index, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        for _, after, raw in LineReader().lines(_reading(stream), size):
            try:
                entry = index_entry(raw, names)
            except BadLine:
                break
            if entry["at"][0] != covered:
                break
            covered, good, names = entry["at"][1], after, tuple(entry["names"])
    return covered, good


def _checked_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        for first, after, raw in LineReader(start).lines(_reading(stream), size):
            try:
                yield first, after, record_line(raw)
            except BadLine:
                continue  # whoever watches the run counts and shows it


def _reading(stream: BinaryIO) -> Callable[[int, int], bytes]:
    def read(start: int, length: int) -> bytes:
        stream.seek(start)
        return stream.read(length)

    return read


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as numbers; anything else as what it prints."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that can be used: what a crash tore, or another program wrote, is left out."""
    return (line for _, _, line in _checked_lines(path))


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """The surviving history: for each step the values that count, in order of steps."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if is_restart(line):
            steps = {step: values for step, values in steps.items() if step < line["step"]}
        elif is_step(line):
            steps[line["step"]] = {**steps.get(line["step"], {}), **line}
    return dict(sorted(steps.items()))
