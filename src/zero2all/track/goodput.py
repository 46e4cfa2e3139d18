"""Goodput: the fraction of a run's wall time spent on steps that count, and what the rest was spent on.

The run record has the time of every step, start and stop, over all restarts; recomputed steps are in it twice.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from zero2all.base.units import show_seconds
from zero2all.track.record_lines import (
    MAX_LINE_BYTES,
    RESTART_EVENTS,
    EventLine,
    RecordLine,
    SampleLine,
    StepLine,
    is_number,
    restart_step,
)
from zero2all.track.run_locations import RECORD_FILE
from zero2all.track.run_record import read_record_lines

LOST_TIME_CATEGORIES = ("start-up", "checkpoint stall", "evaluation", "recomputed steps", "hang", "failure")
IDLE_EVENTS = ("stopped", "done")  # the time from here to the next start does not count


@dataclass(frozen=True)
class GoodputReport:
    goodput: float | None
    """None without a step."""
    seconds: float
    """Wall time in which the run was neither stopped nor done."""
    steps: float
    """Seconds of steps that count."""
    lost: dict[str, float]
    """Seconds by category."""
    restarts: int
    steps_done_again: int


def compute_run_goodput(run: Path, ended: float | None = None) -> GoodputReport:
    """Goodput of a run directory: its record, and the hangs reported in ``failures``. ``ended`` is its end time."""
    end = [] if ended is None else [EventLine("done", ended)]
    record = run / RECORD_FILE
    return compute_goodput(chain(read_record_lines(record) if record.exists() else (), end), _hang_times(run))


def compute_goodput(lines: Iterable[RecordLine], hangs: Iterable[float] = ()) -> GoodputReport:
    """Seconds by category. Time in which a run was stopped or done does not count."""
    meter = _GoodputMeter(list(hangs))
    for line in lines:
        meter.add_line(line)
    return meter.result()


def count_restarts(events: Iterable[EventLine]) -> int:
    """How often a run began again after a failure or hang, from its events alone."""
    restarts, running = 0, False
    for event in events:
        if event.event in RESTART_EVENTS and event.details.get("startup") is not None:  # a rollback has none
            restarts += running
            running = True
        elif event.event in IDLE_EVENTS:
            running = False
    return restarts


def _hang_times(run: Path) -> list[float]:
    """The times of the hangs in the failure reports. A file that is none is skipped."""
    times = []
    for path in sorted((run / "failures").glob("*.json")):
        with suppress(OSError, ValueError, RecursionError):
            if not path.is_file() or path.stat().st_size > MAX_LINE_BYTES:
                continue
            report = json.loads(path.read_bytes())
            if isinstance(report, dict) and report.get("kind") == "hang" and is_number(report.get("time")):
                times.append(float(report["time"]))
    return times


class _GoodputMeter:
    def __init__(self, hangs: list[float]) -> None:
        self.hangs = hangs
        self.seconds = dict.fromkeys(LOST_TIME_CATEGORIES, 0.0)
        # The steps that count and the seconds of each. Arrays: a dict of a million steps takes 100 MB.
        self.steps, self.step_seconds = array("q"), array("d")
        self.restarts = 0
        self.recomputed_steps = 0
        self.accounted_until: float | None = None  # all time before this is accounted for
        self.idle = False

    def add_line(self, line: RecordLine) -> None:
        if line.time is None:
            return
        if isinstance(line, StepLine):
            if "checkpoint_stall" in line.metrics:
                self.seconds["checkpoint stall"] += self._since(line.time)
            elif "loss" in line.metrics:
                self.steps.append(line.step)
                self.step_seconds.append(self._since(line.time))
        elif isinstance(line, SampleLine):  # generated after validation, which can take longer than it
            self.seconds["evaluation"] += self._since(line.time)
        elif isinstance(line, EventLine):
            self._add_event(line, line.time)

    def _add_event(self, line: EventLine, now: float) -> None:
        if (step := restart_step(line)) is not None:
            self._begin(step, line.details.get("startup"), now)
        elif line.event == "evaluation":
            self.seconds["evaluation"] += self._since(now)
        elif line.event in IDLE_EVENTS:
            self.seconds["checkpoint stall"] += self._since(now)
            self.idle = True

    def _begin(self, first_step: int, startup: float | None, now: float) -> None:
        """A start, resume or rollback: the steps from that one on are recomputed."""
        started = now - (startup or 0.0)
        if startup is not None and self.accounted_until is not None:
            if not self.idle:
                hung = any(self.accounted_until <= hang <= started for hang in self.hangs)
                self.seconds["hang" if hung else "failure"] += max(0.0, started - self.accounted_until)
                self.restarts += 1
            self.accounted_until = max(self.accounted_until, started)
        elif self.accounted_until is None:
            self.accounted_until = started
        self.seconds["start-up" if startup is not None else "recomputed steps"] += self._since(now)
        while self.steps and self.steps[-1] >= first_step:
            self.steps.pop()
            self.recomputed_steps += 1
            self.seconds["recomputed steps"] += self.step_seconds.pop()
        self.idle = False

    def _since(self, now: float) -> float:
        before = now if self.accounted_until is None else self.accounted_until
        self.accounted_until = max(before, now)
        return self.accounted_until - before

    def result(self) -> GoodputReport:
        productive = sum(self.step_seconds)
        wall = productive + sum(self.seconds.values())
        return GoodputReport(
            goodput=round(productive / wall, 4) if wall else None,
            seconds=round(wall, 3),
            steps=round(productive, 3),
            lost={name: round(seconds, 3) for name, seconds in self.seconds.items()},
            restarts=self.restarts,
            steps_done_again=self.recomputed_steps,
        )


def format_goodput(report: GoodputReport) -> str:
    if report.goodput is None:
        return "goodput: no step yet"
    lost = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in report.lost.items() if seconds >= 0.5)
    recomputed = f" ({report.steps_done_again} steps recomputed)" if report.steps_done_again else ""
    return (
        f"goodput {100 * report.goodput:.1f}% of {show_seconds(report.seconds)}"
        + (f"; lost: {lost}" if lost else "")
        + recomputed
    )
