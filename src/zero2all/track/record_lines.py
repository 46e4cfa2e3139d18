"""Lines of a record and of its index, validated as they are read.

The files of a run may be truncated by a crash, written by another program, or malicious. An invalid line raises
``InvalidLineError`` with the reason; the reader counts it and continues with the next one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

MAX_LINE_BYTES = 8 * 2**20  # the rest of a longer line is skipped without being buffered
MAX_DEPTH = 32  # nested lists and objects in a line
MAX_STEP = 2**53  # beyond it a float64 cannot represent every integer
MAX_TIME = 1e12  # seconds since the epoch
RESTART_EVENTS = ("start", "resume")
ByteRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepLine:
    """Metrics of a step; NaN and infinities included."""

    step: int
    time: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class EventLine:
    event: str
    time: float | None
    details: dict[str, Any] = field(default_factory=dict)
    """Its other values by name, the step among them."""

    @property
    def step(self) -> int | None:
        return self.details.get("step")


@dataclass(frozen=True, slots=True)
class SampleLine:
    sample: str
    step: int
    time: float | None
    text: str


@dataclass(frozen=True, slots=True)
class HistogramLine:
    histogram: str
    step: int
    time: float | None
    counts: list[float]
    edges: list[float]


RecordLine = StepLine | EventLine | SampleLine | HistogramLine


@dataclass(frozen=True)
class LoggedLine:
    """A sample or histogram in the index."""

    kind: str
    """``sample`` or ``histogram``."""
    name: str
    step: int


@dataclass(frozen=True)
class IndexEntry:
    """A chunk of a record. Without step lines it has only the other lines."""

    at: ByteRange
    lines: int = 0
    steps: tuple[int, int] = (0, 0)
    times: tuple[float, float] = (0.0, 0.0)
    names: tuple[str, ...] = ()
    min: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    max: list[float] = field(default_factory=list)
    others: list[tuple[EventLine | LoggedLine, ByteRange]] = field(default_factory=list)


class InvalidLineError(ValueError):
    """Why a line cannot be used."""


class LineReader:
    """Follows a growing file: yields each line once, as soon as it is complete.

    ``offset`` is the byte up to which the file is read. A line over ``MAX_LINE_BYTES`` is yielded once, as None.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._skipping_long_line = False

    def read_lines(self, read: Callable[[int, int], bytes], stop: int) -> Iterator[tuple[int, int, bytes | None]]:
        """(start, end, line) of every line that ``read(start, length)`` has up to byte ``stop``."""
        while self.offset < stop:
            block, length = self.offset, min(MAX_LINE_BYTES, stop - self.offset)
            data, done = read(block, length), 0
            while (end := data.find(b"\n", done)) >= 0:
                self.offset = block + end + 1
                if self._skipping_long_line:
                    self._skipping_long_line = False
                else:
                    yield block + done, self.offset, data[done:end]
                done = end + 1
            if not done and (len(data) == MAX_LINE_BYTES or self._skipping_long_line):
                if not self._skipping_long_line:
                    self._skipping_long_line = True
                    yield block, block + len(data), None
                self.offset = block + len(data)
            elif not done:
                return  # the last line is incomplete
            if len(data) < length:
                return  # the file ends before its reported size


def is_within_line_limit(line: bytes) -> bool:
    """Whether readers accept a line of this length; only then may the index point to it."""
    return len(line) <= MAX_LINE_BYTES


def parse_json_line(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise InvalidLineError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(raw)
    except RecursionError:
        raise InvalidLineError("nested too deeply") from None
    except ValueError:
        raise InvalidLineError("not JSON") from None
    if not isinstance(value, dict):
        raise InvalidLineError("not a JSON object")
    return value


def parse_record_line(raw: bytes | None) -> RecordLine:
    """A record line in which every value that is used later has the expected type."""
    return _parse_line(parse_json_line(raw))


def line_to_json(line: RecordLine) -> dict[str, Any]:
    """The keys of a line in their order in the file."""
    time = {} if line.time is None else {"time": line.time}
    match line:
        case StepLine():
            return {"step": line.step, **time, **line.metrics}
        case EventLine():
            return {"event": line.event, **time, **line.details}
        case SampleLine():
            return {"sample": line.sample, "step": line.step, **time, "text": line.text}
        case HistogramLine():
            head = {"histogram": line.histogram, "step": line.step}
            return {**head, **time, "counts": line.counts, "edges": line.edges}


def restart_step(line: RecordLine) -> int | None:
    """The step at which a start or resume begins; None for any other line."""
    return line.step if isinstance(line, EventLine) and line.event in RESTART_EVENTS else None


def is_number(value: Any) -> bool:
    """A number that a float can represent, including NaN and infinities."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP


def is_shallow(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects are nested at most ``levels`` deep."""
    if not isinstance(value, dict | list):
        return True
    children = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(child, levels - 1) for child in children)


def parse_index_entry(raw: bytes | None, previous_names: tuple[str, ...]) -> IndexEntry:
    """An index entry. An entry without ``names`` has ``previous_names``, from the entry before it."""
    entry = {"names": list(previous_names), "others": [], **parse_json_line(raw)}
    at, names = _parse_byte_range(entry), entry["names"]
    if not is_count(entry.get("lines")):
        _reject("lines is not a count")
    others = [_parse_other(other) for other in (entry["others"] if isinstance(entry["others"], list) else [None])]
    if not _is_list(names, lambda name: isinstance(name, str)):
        _reject("names are not text")
    if not entry["lines"]:
        return IndexEntry(at, names=tuple(names), others=others)
    _validate_columns(entry)
    low, mean, high = entry["min"], entry["mean"], entry["max"]
    steps, times = tuple(entry["steps"]), tuple(entry["times"])
    return IndexEntry(at, entry["lines"], steps, times, tuple(names), low, mean, high, others)


def _reject(reason: str) -> NoReturn:
    raise InvalidLineError(reason)


def _parse_line(line: dict[str, Any]) -> RecordLine:
    has_time, time = "time" in line, line.pop("time", None)
    if has_time and (not is_number(time) or not math.isfinite(time) or abs(time) > MAX_TIME):
        _reject("time is not a number of seconds")
    kind = next((kind for kind in ("event", "sample", "histogram") if kind in line), None)
    if kind == "event":
        _validate_event(line)
        return EventLine(line.pop("event"), time, line)
    if not is_count(step := line.pop("step", None)):
        _reject("step is not an integer")
    if kind is None:
        return StepLine(step, time, _valid_metrics(line))
    name = line[kind]
    if kind == "sample":
        if not isinstance(name, str) or not isinstance(line.get("text"), str):
            _reject("a sample without name or text")
        return SampleLine(name, step, time, line["text"])
    counts, edges = line.get("counts"), line.get("edges")
    is_valid = isinstance(name, str) and _is_list(counts, is_number) and _is_list(edges, is_number)
    if not is_valid or len(line["edges"]) != len(line["counts"]) + 1:
        _reject("a histogram without name, counts or edges")
    return HistogramLine(name, step, time, line["counts"], line["edges"])


def _valid_metrics(values: dict[str, Any]) -> dict[str, float]:
    """The numbers among the values. This is where most of the time of reading a record goes."""
    others = [name for name, value in values.items() if type(value) is not float and not is_number(value)]
    for name in others:
        value = values.pop(name)
        if isinstance(value, int) and not isinstance(value, bool):
            _reject(f"{name[:40]} is larger than any float")
        if not is_shallow(value):
            _reject("nested too deeply")
    return values


def _validate_event(line: dict[str, Any]) -> None:
    step, event = line.get("step"), line["event"]
    if not isinstance(event, str):
        _reject("event is not text")
    needs_step = event in RESTART_EVENTS or (event == "evaluation" and "bits_per_byte" in line)
    if not is_count(step) and (needs_step or step is not None):
        _reject("step is not an integer")
    if not is_number(line.get("startup", 0.0)):
        _reject("startup is not a number")
    if event == "evaluation" and "bits_per_byte" in line:
        sections: list[Any] = [line]
        for part in (line.get("sources", {}), line.get("test_sets", {})):
            sections += part.values() if isinstance(part, dict) else [None]
        if not all(isinstance(section, dict) and is_number(section.get("bits_per_byte")) for section in sections):
            _reject("an evaluation without bits_per_byte")
    if event == "goodput" and line.get("goodput") is not None and not is_number(line["goodput"]):
        _reject("goodput is not a number")
    if not _is_list(line.get("documents", []), lambda document: isinstance(document, dict)):
        _reject("documents are not a list of objects")
    if not is_shallow(line):
        _reject("nested too deeply")


def _parse_other(other: Any) -> tuple[EventLine | LoggedLine, ByteRange]:
    """An event in full; for a sample or histogram its name, step and byte range."""
    if not isinstance(other, dict):
        _reject("others are not objects")
    if "event" in other:
        other.pop("at", None)
        event = _parse_line(other)
        assert isinstance(event, EventLine)
        return event, (0, 0)
    kind = "sample" if "sample" in other else "histogram"
    if not isinstance(other.get(kind), str) or not is_count(other.get("step")):
        _reject("a sample or histogram without name or step")
    start, end = _parse_byte_range(other)
    if end - start > MAX_LINE_BYTES:
        _reject(f"a line longer than {MAX_LINE_BYTES} bytes")
    return LoggedLine(kind, other[kind], other["step"]), (start, end)


def _parse_byte_range(entry: dict[str, Any]) -> ByteRange:
    byte_range = entry.get("at")
    if not _is_list(byte_range, is_count, 2) or not entry["at"][0] < entry["at"][1]:
        _reject("at is not a range of bytes")
    return entry["at"][0], entry["at"][1]


def _validate_columns(entry: dict[str, Any]) -> None:
    if not _is_list(entry.get("steps"), is_count, 2):
        _reject("steps are not a range")
    if not _is_list(entry.get("times"), is_number, 2) or not all(abs(time) <= MAX_TIME for time in entry["times"]):
        _reject("times are not a range")
    for column in ("min", "mean", "max"):
        if not _is_list(entry.get(column), is_number, len(entry["names"])):
            _reject(f"{column} does not fit names")


def _is_list(value: Any, is_valid: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, list) and all(map(is_valid, value)) and length in (None, len(value))
