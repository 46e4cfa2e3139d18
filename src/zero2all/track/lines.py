"""Lines of a record and of its index, checked as they are read.

The files of a run may have been torn by a crash, written by another program, or made to do harm. A line that is not
what it should be raises ``BadLine`` with the reason; whoever reads counts it and takes the next one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

LONGEST = 8 * 2**20  # bytes of a line; the rest of a longer one is skipped without being kept
DEEPEST = 32  # levels of lists and objects inside a line
LARGEST_STEP = 2**53  # the largest integer that a chart can tell from its neighbours
LATEST = 1e12  # seconds since the epoch
RESTARTS = ("start", "resume")
NOT_VALUES = ("step", "time")


class BadLine(ValueError):
    """Why a line cannot be used."""


class LineReader:
    """Follows a file that grows: gives each line once, as soon as it has its end.

    ``at`` is the byte up to which the file is read. A line of more than ``LONGEST`` bytes is given as None, once.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._inside_long = False

    def lines(self, read: Callable[[int, int], bytes], stop: int) -> Iterator[tuple[int, int, bytes | None]]:
        """(first byte, byte after, line) of all that ``read(start, length)`` has up to byte ``stop``."""
        while self.at < stop:
            block, length = self.at, min(LONGEST, stop - self.at)
            data, done = read(block, length), 0
            while (end := data.find(b"\n", done)) >= 0:
                self.at = block + end + 1
                if self._inside_long:
                    self._inside_long = False
                else:
                    yield block + done, self.at, data[done:end]
                done = end + 1
            if not done and (len(data) == LONGEST or self._inside_long):
                if not self._inside_long:
                    self._inside_long = True
                    yield block, block + len(data), None
                self.at = block + len(data)
            elif not done:
                return  # the last line, which has no end yet
            if len(data) < length:
                return  # the file ends before the size that was named


def fits(line: bytes) -> bool:
    """Whether readers will take a line, which then may be in the index."""
    return len(line) <= LONGEST


def parse_line(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise BadLine(f"longer than {LONGEST} bytes")
    try:
        value = json.loads(raw)
    except RecursionError:
        raise BadLine("nested too deeply") from None
    except ValueError:
        raise BadLine("not JSON") from None
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    return value


def record_line(raw: bytes | None) -> dict[str, Any]:
    """A line of a record in which everything that is read later has its right type."""
    line = parse_line(raw)
    _check(line)
    return line


def is_step(line: dict[str, Any]) -> bool:
    return "step" in line and not any(kind in line for kind in ("event", "sample", "histogram"))


def is_restart(line: dict[str, Any]) -> bool:
    return line.get("event") in RESTARTS


def is_number(value: Any) -> bool:
    """A number that a float can hold; NaN and infinities are."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_STEP


def is_shallow(value: Any, levels: int = DEEPEST) -> bool:
    """Whether lists and objects are nested no deeper than we can walk."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(one, levels - 1) for one in inner)


def index_entry(raw: bytes | None, names: tuple[str, ...]) -> dict[str, Any]:
    """A line of an index; ``names`` are those of the entry before, which it has if it does not say its own."""
    entry = {"names": list(names), **parse_line(raw)}
    _check_range(entry)
    if not is_count(entry.get("lines")):
        _refuse("lines is not a count")
    for other in entry.setdefault("others", []) if isinstance(entry.get("others", []), list) else [None]:
        _check_pointer(other)
    if not _is_list(entry["names"], lambda name: isinstance(name, str)):
        _refuse("names are not text")
    if entry["lines"]:
        _check_columns(entry)
    return entry


def _refuse(reason: str) -> NoReturn:
    raise BadLine(reason)


def _check(line: dict[str, Any]) -> None:
    time = line.get("time", 0.0)
    if not is_number(time) or not math.isfinite(time) or abs(time) > LATEST:
        _refuse("time is not a number of seconds")
    if "event" in line:
        _check_event(line)
        return
    if not is_count(line.get("step")):
        _refuse("step is not an integer")
    if "sample" in line:
        if not isinstance(line["sample"], str) or not isinstance(line.get("text"), str):
            _refuse("a sample without name or text")
    elif "histogram" in line:
        counts, edges = line.get("counts"), line.get("edges")
        right = isinstance(line["histogram"], str) and _is_list(counts, is_number) and _is_list(edges, is_number)
        if not right or len(line["edges"]) != len(line["counts"]) + 1:
            _refuse("a histogram without name, counts or edges")
    else:
        for name, value in line.items():
            if isinstance(value, int) and not isinstance(value, bool) and not is_number(value):
                _refuse(f"{name[:40]} is larger than any float")
            if not is_shallow(value):
                _refuse("nested too deeply")


def _check_event(line: dict[str, Any]) -> None:
    step, event = line.get("step"), line["event"]
    if not isinstance(event, str):
        _refuse("event is not text")
    needs_step = is_restart(line) or (event == "evaluation" and "bits_per_byte" in line)
    if not is_count(step) and (needs_step or step is not None):
        _refuse("step is not an integer")
    if not is_number(line.get("startup", 0.0)):
        _refuse("startup is not a number")
    if event == "evaluation" and "bits_per_byte" in line:
        sources = line.get("sources", {})
        parts = [line, *sources.values()] if isinstance(sources, dict) else [None]
        if not all(isinstance(part, dict) and is_number(part.get("bits_per_byte")) for part in parts):
            _refuse("an evaluation without bits_per_byte")
    if event == "goodput" and line.get("goodput") is not None and not is_number(line["goodput"]):
        _refuse("goodput is not a number")
    if not _is_list(line.get("documents", []), lambda document: isinstance(document, dict)):
        _refuse("documents are not a list of objects")
    if not is_shallow(line):
        _refuse("nested too deeply")


def _check_pointer(other: Any) -> None:
    """An event whole; of a sample or histogram the name, the step and the place."""
    if not isinstance(other, dict):
        _refuse("others are not objects")
    if "event" in other:
        _check(other)
        return
    kind = "sample" if "sample" in other else "histogram"
    if not isinstance(other.get(kind), str) or not is_count(other.get("step")):
        _refuse("a sample or histogram without name or step")
    _check_range(other)
    if other["at"][1] - other["at"][0] > LONGEST:
        _refuse(f"a line longer than {LONGEST} bytes")


def _check_range(entry: dict[str, Any]) -> None:
    at = entry.get("at")
    if not _is_list(at, is_count, 2) or not entry["at"][0] < entry["at"][1]:
        _refuse("at is not a range of bytes")


def _check_columns(entry: dict[str, Any]) -> None:
    if not _is_list(entry.get("steps"), is_count, 2):
        _refuse("steps are not a range")
    if not _is_list(entry.get("times"), is_number, 2) or not all(abs(time) <= LATEST for time in entry["times"]):
        _refuse("times are not a range")
    for column in ("min", "mean", "max"):
        if not _is_list(entry.get(column), is_number, len(entry["names"])):
            _refuse(f"{column} does not fit names")


def _is_list(value: Any, right: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, list) and all(map(right, value)) and length in (None, len(value))
