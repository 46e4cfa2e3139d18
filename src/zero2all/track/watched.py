"""A run as it is watched: its streams of all ranks, what it is, and how it stands."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from zero2all.errors import Z2aError
from zero2all.track.facts import Facts, read_facts
from zero2all.track.lines import is_count, is_restart
from zero2all.track.places import FACTS, RECORD, Place
from zero2all.track.stream import Stream, Table
from zero2all.units import show_bytes

RANK_FILE = re.compile(r"record\.rank([0-9]+)\.jsonl")
HEADLINES: tuple[str, ...] = ("loss", "tokens_per_second", "mfu", "tokens")
ENDINGS = ("done", "stopped", "not finite", "failure")


class WatchedRun:
    """
    >>> run = WatchedRun(LocalPlace(Path("runs/first/run")))
    >>> run.refresh()
    >>> run.table(["loss"], points=1500).mean["loss"]
    """

    def __init__(self, place: Place) -> None:
        self.place, self.name = place, place.name
        self.streams = {0: Stream(place, RECORD)}
        self.facts = Facts()
        self.trouble: str | None = None  # why the place cannot be read just now
        self._facts_size: dict[str, int] = {}

    def refresh(self) -> bool:
        """Take in what is new; whether there was anything. What goes wrong is the run's trouble, and never raised."""
        before, self.trouble = self.trouble, None
        changed = False
        try:
            sizes = self.place.sizes()
        except Exception as error:
            self._note(error)
            return self.trouble != before
        for file in sizes:
            if match := RANK_FILE.fullmatch(file):
                self.streams.setdefault(int(match[1]), Stream(self.place, file))
        for look in (self._read_facts, *(stream.refresh for stream in self.streams.values())):
            try:
                changed = look(sizes) or changed
            except Exception as error:  # the other files, and the other runs, are shown all the same
                self._note(error)
        return changed or self.trouble != before

    def catch_up(self, seconds: float = 300.0) -> None:
        """Read all that is there, which may take several looks."""
        until = time.monotonic() + seconds
        read = -1
        while (now := sum(stream.read_to for stream in self.streams.values())) > read:
            if time.monotonic() > until:
                self.trouble = f"only its first {show_bytes(now)} were read in {seconds:.0f} s"
                return
            read = now
            self.refresh()

    def _note(self, error: Exception) -> None:
        self.trouble = reason(error)

    @property
    def damage(self) -> list[str]:
        """What in the files of the run could not be used, and where that began."""
        found = list(self.facts.damage)
        for stream in self.streams.values():
            for file, where in stream.damage.items():
                lines = "1 line skipped" if stream.skipped == 1 else f"{stream.skipped} lines skipped"
                what = f"{lines}, the first at" if file == stream.file else "not used past"
                found.append(f"{file}: {what} {where}")
        return found

    @property
    def names(self) -> list[str]:
        """Of rank 0 as they are, of another rank with ``@`` and its number; then those of evaluations."""
        written = [
            name if rank == 0 else f"{name}@{rank}" for rank, s in sorted(self.streams.items()) for name in s.names
        ]
        return [*written, *self.held_out().mean]

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.streams[0].events

    @property
    def last_step(self) -> int | None:
        return self.streams[0].last_step

    @property
    def total_steps(self) -> int | None:
        starts = [event["steps"] for event in self.events if is_restart(event) and is_count(event.get("steps"))]
        return starts[-1] if starts else None

    @property
    def ended(self) -> str | None:
        """How it ended, if it did."""
        last = [event for event in self.events if event["event"] in (*ENDINGS, "start", "resume")][-1:]
        return last[0]["event"] if last and last[0]["event"] in ENDINGS else None

    def table(
        self, names: list[str], first: float = -math.inf, last: float = math.inf, points: int = 10**9, rank: int = 0
    ) -> Table:
        return self.streams[rank].table(names, first, last, points)

    def held_out(self, first: float = -math.inf, last: float = math.inf) -> Table:
        """Bits per byte on held-out text, a row an evaluation: ``held_out/all`` and a column for each source."""
        rows = [
            event
            for event in self.events
            if event["event"] == "evaluation" and "bits_per_byte" in event and first <= event["step"] <= last
        ]
        by_name: dict[str, list[float]] = {}
        for number, event in enumerate(rows):
            figures = {"all": event, **event.get("sources", {})}
            for name, part in figures.items():
                column = by_name.setdefault(f"held_out/{name}", [math.nan] * len(rows))
                column[number] = part["bits_per_byte"]
        return Table(
            np.array([event["step"] for event in rows], dtype=np.float64),
            np.array([event.get("time", 0.0) for event in rows], dtype=np.float64),
            {name: np.array(column) for name, column in by_name.items()},
        )

    def status(self) -> dict[str, Any]:
        """The figures at the top of a page."""
        wanted = [name for name in HEADLINES if name in self.streams[0].names]
        recent = self.table(wanted, first=(self.last_step or 0) - 200)
        latest = {name: _last(recent.mean[name]) for name in wanted}
        seconds = _step_seconds(recent)
        left = None
        if self.total_steps is not None and self.last_step is not None and seconds is not None and self.ended is None:
            left = max(0, self.total_steps - self.last_step - 1) * seconds
        return {
            "name": self.name,
            "step": self.last_step,
            "steps": self.total_steps,
            "time": float(recent.times[-1]) if len(recent.times) else None,
            "latest": {name: value for name, value in latest.items() if value is not None},
            "step_seconds": seconds,
            "seconds_left": left,
            "goodput": self.goodput(),
            "ended": self.ended,
            "trouble": self.trouble,
            "damage": self.damage,
        }

    def goodput(self) -> float | None:
        """Share of the time since the first start that went into steps which count: as the run itself found at its end,
        before that at the median pace."""
        told = [event.get("goodput") for event in self.events if event["event"] == "goodput"]
        if told and told[-1] is not None and self.ended is not None:
            return float(told[-1])
        steps, times = self.streams[0].milestones()
        starts = [event["time"] for event in self.events if event["event"] == "start" and "time" in event]
        moved = np.diff(steps) > 0
        if not moved.any():
            return None
        pace = float(np.median(np.diff(times)[moved] / np.diff(steps)[moved]))
        elapsed = float(times[-1]) - (starts[0] if starts else float(times[0]))
        return min(1.0, pace * (float(steps[-1] - steps[0]) + 1) / elapsed) if elapsed > 0 else None

    def tokens_at(self, table: Table) -> list[float] | None:
        """Tokens seen after each row, from the record or else from the recipe."""
        if "tokens" in table.mean:
            return [float(value) for value in table.mean["tokens"]]
        if self.facts.batch_tokens is None:
            return None
        return [(float(step) + 1) * self.facts.batch_tokens for step in table.steps]

    def text(self, kind: str, name: str, step: int) -> dict[str, Any] | None:
        return self.streams[0].line(kind, name, step)

    def samples(self, kind: str = "sample") -> dict[str, list[int]]:
        """Steps at which there are samples (or histograms), by name."""
        found: dict[str, list[int]] = {}
        for there, name, step in sorted(self.streams[0].pointers):
            if there == kind:
                found.setdefault(name, []).append(step)
        return found

    def lines_after(self, sequence: int) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, line) for number, line in list(self.streams[0].recent) if number > sequence)

    def _read_facts(self, sizes: dict[str, int]) -> bool:
        wanted = {name: size for name, size in sizes.items() if name in FACTS}
        if wanted == self._facts_size:
            return False
        self.facts = read_facts(self.place, wanted)
        self._facts_size = wanted
        return True

    @property
    def silent_seconds(self) -> float | None:
        """Since the last line, for a run that has not ended."""
        last = self.table([], first=(self.last_step or 0) - 1).times
        return time.time() - float(last[-1]) if len(last) and self.ended is None else None


def reason(error: Exception) -> str:
    """Why a run cannot be read or judged, in one line."""
    return str(error) if isinstance(error, Z2aError) else f"this is a bug in zero2all: {type(error).__name__}: {error}"


def _last(column: Any) -> float | None:
    there = column[np.isfinite(column)]
    return float(there[-1]) if len(there) else None


def _step_seconds(table: Table) -> float | None:
    if len(table.steps) < 2:
        return None
    return float(np.median(np.diff(table.times) / np.maximum(np.diff(table.steps), 1)))
