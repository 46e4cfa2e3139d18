"""A run as it is watched: its streams of all ranks, what it is, and how it stands."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from zero2all.track.places import RECORD, Place
from zero2all.track.ssh import Unreachable
from zero2all.track.stream import Stream, Table

RANK_FILE = re.compile(r"record\.rank([0-9]+)\.jsonl")
HEADLINES: tuple[str, ...] = ("loss", "tokens_per_second", "mfu", "tokens")
ENDINGS = ("done", "stopped", "not finite", "failure")


@dataclass(frozen=True)
class Facts:
    """What the files beside a record say, as far as they are there."""

    name: str = ""
    sources: tuple[str, ...] = ()
    vocab_size: int | None = None
    batch_tokens: int | None = None
    recipe: str = ""
    environment: dict[str, Any] | None = None


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
        """Take in what is new; whether there was anything. A place that cannot be read is noted, not raised."""
        trouble = self.trouble
        try:
            sizes = self.place.sizes()
            for file in sizes:
                if match := RANK_FILE.fullmatch(file):
                    self.streams.setdefault(int(match[1]), Stream(self.place, file))
            self._read_facts(sizes)
            changed = [stream.refresh(sizes) for stream in self.streams.values()]
            self.trouble = None
        except Unreachable as error:
            changed, self.trouble = [], str(error)
        return any(changed) or self.trouble != trouble

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
        starts = [event["steps"] for event in self.events if isinstance(event.get("steps"), int)]
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
        }

    def goodput(self) -> float | None:
        """Share of the time since the first start that went into steps which count: as the run itself found at its end,
        before that at the median pace."""
        told = [event["goodput"] for event in self.events if event["event"] == "goodput"]
        if told and self.ended is not None:
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

    def _read_facts(self, sizes: dict[str, int]) -> None:
        wanted = {name: size for name, size in sizes.items() if name.endswith((".yaml", ".json"))}
        if wanted == self._facts_size:
            return
        texts = {name: self.place.read(name, 0, size).decode("utf-8", "replace") for name, size in wanted.items()}
        self._facts_size = wanted
        recipe = _mapping(texts.get("recipe.yaml", ""), yaml.safe_load)
        identity = _mapping(texts.get("identity.json", ""), json.loads)
        self.facts = Facts(
            name=str(recipe.get("name", "")),
            sources=tuple(str(source.get("name")) for source in (recipe.get("corpus") or {}).get("sources") or []),
            vocab_size=(identity.get("model") or {}).get("vocab_size"),
            batch_tokens=(recipe.get("train") or {}).get("batch_tokens"),
            recipe=texts.get("recipe.yaml", ""),
            environment=_mapping(texts.get("environment.json", ""), json.loads),
        )

    @property
    def silent_seconds(self) -> float | None:
        """Since the last line, for a run that has not ended."""
        last = self.table([], first=(self.last_step or 0) - 1).times
        return time.time() - float(last[-1]) if len(last) and self.ended is None else None


def _mapping(text: str, parse: Any) -> dict[str, Any]:
    """A file that is being replaced or is not there says nothing."""
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _last(column: Any) -> float | None:
    there = column[np.isfinite(column)]
    return float(there[-1]) if len(there) else None


def _step_seconds(table: Table) -> float | None:
    if len(table.steps) < 2:
        return None
    return float(np.median(np.diff(table.times) / np.maximum(np.diff(table.steps), 1)))
