"""Goodput: the fraction of a run's wall time spent on steps that count, and what the rest was spent on.

The run record has the time of every step, start and stop, over all restarts; recomputed steps are in it twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from zero2all.track.run_record import read_record_lines
from zero2all.units import show_seconds

LOST_TIME_CATEGORIES = ("start-up", "checkpoint stall", "evaluation", "recomputed steps", "hang", "failure")


def compute_run_goodput(run: Path, ended: float | None = None) -> dict[str, Any]:
    """Goodput of a run directory: its record, and the hangs reported in ``failures``. ``ended`` is its end time."""
    hangs = []
    for path in sorted((run / "failures").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("kind") == "hang":
            hangs.append(float(report["time"]))
    end = [] if ended is None else [{"event": "done", "time": ended}]
    record = run / "record.jsonl"
    return compute_goodput(chain(read_record_lines(record) if record.exists() else (), end), hangs)


def compute_goodput(lines: Iterable[dict[str, Any]], hangs: Iterable[float] = ()) -> dict[str, Any]:
    """Seconds by category. Time in which a run was stopped or done does not count."""
    meter = _GoodputMeter(list(hangs))
    for line in lines:
        meter.add_line(line)
    return meter.result()


class _GoodputMeter:
    def __init__(self, hangs: list[float]) -> None:
        self.hangs = hangs
        self.seconds = dict.fromkeys(LOST_TIME_CATEGORIES, 0.0)
        self.steps: dict[int, float] = {}  # seconds of each step that counts
        self.restarts = 0
        self.recomputed_steps = 0
        self.accounted_until: float | None = None  # all time before this is accounted for
        self.idle = False

    def add_line(self, line: dict[str, Any]) -> None:
        now, event = line.get("time"), line.get("event")
        if now is None:
            return
        if event in ("start", "resume"):
            self._begin(line, now)
        elif event == "evaluation":
            self.seconds["evaluation"] += self._since(now)
        elif event in ("stopped", "done"):
            self.seconds["checkpoint stall"] += self._since(now)
            self.idle = True
        elif event is None and "checkpoint_stall" in line:
            self.seconds["checkpoint stall"] += self._since(now)
        elif event is None and "loss" in line:
            self.steps[line["step"]] = self._since(now)

    def _begin(self, line: dict[str, Any], now: float) -> None:
        """A start, resume or rollback: the steps from that one on are recomputed."""
        started = now - line.get("startup", 0.0)
        if "startup" in line and self.accounted_until is not None:
            if not self.idle:
                hung = any(self.accounted_until <= hang <= started for hang in self.hangs)
                self.seconds["hang" if hung else "failure"] += max(0.0, started - self.accounted_until)
                self.restarts += 1
            self.accounted_until = max(self.accounted_until, started)
        elif self.accounted_until is None:
            self.accounted_until = started
        self.seconds["start-up" if "startup" in line else "recomputed steps"] += self._since(now)
        recomputed = [step for step in self.steps if step >= line["step"]]
        self.recomputed_steps += len(recomputed)
        self.seconds["recomputed steps"] += sum(self.steps.pop(step) for step in recomputed)
        self.idle = False

    def _since(self, now: float) -> float:
        before = now if self.accounted_until is None else self.accounted_until
        self.accounted_until = max(before, now)
        return self.accounted_until - before

    def result(self) -> dict[str, Any]:
        productive = sum(self.steps.values())
        wall = productive + sum(self.seconds.values())
        return {
            "goodput": round(productive / wall, 4) if wall else None,
            "seconds": round(wall, 3),
            "steps": round(productive, 3),
            "lost": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "restarts": self.restarts,
            "steps_done_again": self.recomputed_steps,
        }


def format_goodput(report: dict[str, Any]) -> str:
    if report["goodput"] is None:
        return "goodput: no step yet"
    lost = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in report["lost"].items() if seconds >= 0.5)
    recomputed = f" ({report['steps_done_again']} steps recomputed)" if report["steps_done_again"] else ""
    return (
        f"goodput {100 * report['goodput']:.1f} % of {show_seconds(report['seconds'])}"
        + (f"; lost: {lost}" if lost else "")
        + recomputed
    )
