"""Goodput: the share of a run's time that went into steps which count, and where the rest went.

The run record is the journal: it has the time of every step, start and stop, over all restarts, and steps that had to
be done again are in it twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from zero2all.track.reslog import read_lines
from zero2all.units import show_seconds

LOSSES = ("start-up", "checkpoint stall", "evaluation", "recomputed steps", "hang", "failure")


def goodput_of(run: Path, ended: float | None = None) -> dict[str, Any]:
    """Of a run directory: its record, and what the reports in ``failures`` call a hang. ``ended`` is its end."""
    hangs = []
    for path in sorted((run / "failures").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("kind") == "hang":
            hangs.append(float(report["time"]))
    end = [] if ended is None else [{"event": "done", "time": ended}]
    record = run / "record.jsonl"
    return goodput(chain(read_lines(record) if record.exists() else (), end), hangs)


def goodput(lines: Iterable[dict[str, Any]], hangs: Iterable[float] = ()) -> dict[str, Any]:
    """Seconds by what they went to. Time in which a run rested, since it was stopped or done, is no part of it."""
    account = _Account(list(hangs))
    for line in lines:
        account.take(line)
    return account.result()


class _Account:
    def __init__(self, hangs: list[float]) -> None:
        self.hangs = hangs
        self.seconds = dict.fromkeys(LOSSES, 0.0)
        self.steps: dict[int, float] = {}  # seconds of each step that counts
        self.restarts = 0
        self.again = 0
        self.until: float | None = None  # up to here all time is accounted for
        self.resting = False

    def take(self, line: dict[str, Any]) -> None:
        now, event = line.get("time"), line.get("event")
        if now is None:
            return
        if event in ("start", "resume"):
            self._begin(line, now)
        elif event == "evaluation":
            self.seconds["evaluation"] += self._since(now)
        elif event in ("stopped", "done"):
            self.seconds["checkpoint stall"] += self._since(now)
            self.resting = True
        elif event is None and "checkpoint_stall" in line:
            self.seconds["checkpoint stall"] += self._since(now)
        elif event is None and "loss" in line:
            self.steps[line["step"]] = self._since(now)

    def _begin(self, line: dict[str, Any], now: float) -> None:
        """A start, or a step back: what comes from that step on is done again."""
        began = now - line.get("startup", 0.0)
        if "startup" in line and self.until is not None:
            if not self.resting:
                hung = any(self.until <= hang <= began for hang in self.hangs)
                self.seconds["hang" if hung else "failure"] += max(0.0, began - self.until)
                self.restarts += 1
            self.until = max(self.until, began)
        elif self.until is None:
            self.until = began
        self.seconds["start-up" if "startup" in line else "recomputed steps"] += self._since(now)
        undone = [step for step in self.steps if step >= line["step"]]
        self.again += len(undone)
        self.seconds["recomputed steps"] += sum(self.steps.pop(step) for step in undone)
        self.resting = False

    def _since(self, now: float) -> float:
        before = now if self.until is None else self.until
        self.until = max(before, now)
        return self.until - before

    def result(self) -> dict[str, Any]:
        forward = sum(self.steps.values())
        wall = forward + sum(self.seconds.values())
        return {
            "goodput": round(forward / wall, 4) if wall else None,
            "seconds": round(wall, 3),
            "steps": round(forward, 3),
            "lost": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "restarts": self.restarts,
            "steps_done_again": self.again,
        }


def in_words(found: dict[str, Any]) -> str:
    if found["goodput"] is None:
        return "goodput: nothing was done yet"
    lost = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in found["lost"].items() if seconds >= 0.5)
    done_again = f" ({found['steps_done_again']} steps were done again)" if found["steps_done_again"] else ""
    return (
        f"goodput {100 * found['goodput']:.1f} % of {show_seconds(found['seconds'])}"
        + (f"; lost: {lost}" if lost else "")
        + done_again
    )


def process_started() -> float:
    """When this process began, as seconds since the epoch; now, where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)
    except (OSError, ValueError, AttributeError, IndexError):
        return time.time()
