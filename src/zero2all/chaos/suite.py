"""Run the faults one after another, and hold each job against one that nothing happened to."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.chaos.audit import audit
from zero2all.chaos.faults import FAULTS, Fault, expect
from zero2all.chaos.scene import Scene
from zero2all.chaos.world import build_world
from zero2all.console import say
from zero2all.errors import UsageError, Z2aError
from zero2all.io import write_json, write_text
from zero2all.track import read_steps
from zero2all.track.reslog import read_lines

COLUMNS = ("fault", "detected s", "recovered s", "steps again", "samples lost", "samples repeated", "")


@dataclass
class Row:
    """What became of one fault. Without problems it was survived."""

    fault: str
    detected: float | None = None
    """Seconds from the fault until somebody noticed."""
    recovered: float | None = None
    """Seconds from the fault until the first step after it."""
    steps_again: int = 0
    lost: int = 0
    repeated: int = 0
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    """Why it could not be caused here."""
    cost: dict[str, float] | None = None
    """Where the seconds went, as the agent saw it."""


def run_suite(out: Path, only: Sequence[str] = (), seed: int = 0) -> list[Row]:
    """Every fault, or those whose names are given; the table is in ``out`` as JSON and Markdown after each."""
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    if unknown := set(only) - {fault.name for fault in FAULTS}:
        known = ", ".join(fault.name for fault in FAULTS)
        raise UsageError(f"no fault is called {', '.join(sorted(unknown))}; there are: {known}")
    out = out.absolute()
    build_world(out / "world", seed)
    calm: dict[tuple[str, ...], Calm] = {}
    rows: list[Row] = []
    for number, fault in enumerate(chosen):
        matters = tuple(change for change in fault.overrides if change.startswith(("train.steps", "parallel")))
        if matters not in calm:  # how states are kept changes no loss
            calm[matters] = undisturbed(out, matters)
        row = run_fault(out, fault, calm[matters], seed)
        rows.append(row)
        say(f"{number + 1}/{len(chosen)} {_line(row)}")
        write_json(out / "chaos.json", {"seed": seed, "rows": [asdict(row) for row in rows]})
        write_text(out / "chaos.md", table(rows) + "\n")
    return rows


@dataclass(frozen=True)
class Calm:
    """A job that nothing happens to: the loss of every step, to the last digit, and how long it took."""

    losses: dict[int, str]
    seconds: float


def undisturbed(out: Path, overrides: tuple[str, ...]) -> Calm:
    scene = Scene(out / "world", out / "undisturbed", [], overrides)
    begin = time.monotonic()
    try:
        expect(scene.run(), 0)
        return Calm(_losses(scene), time.monotonic() - begin)
    finally:
        scene.end()


def run_fault(out: Path, fault: Fault, calm: Calm, seed: int) -> Row:
    row = Row(fault.name)
    if (reason := fault.why_not()) is not None:
        row.skipped = reason
        return row
    dice = random.Random(f"{seed}/{fault.name}")
    scene = Scene(out / "world", out / fault.name.replace(" ", "-"), fault.plants(dice), fault.overrides, calm.seconds)
    try:
        fault.drive(scene)
    except Z2aError as error:
        row.problems.append(str(error))
    finally:
        scene.end()
    _measure(row, scene, fault)
    _judge(row, scene, fault, calm.losses)
    return row


def table(rows: list[Row]) -> str:
    """For people: one line a fault."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        cells = [
            row.fault, _seconds(row.detected), _seconds(row.recovered), row.steps_again, row.lost, row.repeated,
            _verdict(row),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _measure(row: Row, scene: Scene, fault: Fault) -> None:
    struck, reports = scene.struck(), scene.reports()
    if struck is None:
        row.problems.append("the fault never happened")
        return
    times = [report["time"] for report in reports] or [when for when, _ in scene.ended]
    times += [line["time"] for line in _record(scene) if line.get("event") == "spike"]
    row.detected = next((when - struck for when in sorted(times) if when > struck), None)
    after = [line for line in _record(scene) if line["time"] > struck]
    starts = [line["time"] for line in after if line.get("event") in ("start", "resume")]
    steps = [line["time"] for line in after if "loss" in line and starts and line["time"] > starts[0]]
    row.recovered = steps[0] - struck if steps else None
    row.cost = next((report["cost"] for report in reports if "cost" in report), None)


def _judge(row: Row, scene: Scene, fault: Fault, calm: dict[int, str]) -> None:
    """Everything that was promised and is not so."""
    wrong = row.problems
    try:
        plan, passed_over = scene.open().plan(), _passed_over(scene)
        found = audit(scene.directory, plan, passed_over)
        row.steps_again, row.lost, row.repeated = found.steps_again, found.lost, found.repeated
        losses = _losses(scene)
    except (Z2aError, OSError) as error:
        wrong.append(f"the run cannot be read: {error}")
        return
    if row.lost or row.repeated:
        wrong.append("not every sample was seen once")
    if missing := set(range(plan.total)) - set(losses) - passed_over:
        wrong.append(f"{len(missing)} steps are missing from the record")
    # Without the data that was passed over, what follows is another run.
    same = [step for step in losses if step < min(passed_over, default=plan.total)]
    apart = max((abs(float(calm[step]) - float(losses[step])) for step in same), default=0.0)
    if apart > fault.within or (not fault.within and any(losses[step] != calm[step] for step in same)):
        wrong.append(f"the losses differ from the undisturbed run's by up to {apart:.1e}")
    kinds = {report["kind"] for report in scene.reports()}
    if kinds - {fault.kind, *fault.also} or (fault.kind and fault.kind not in kinds):
        wrong.append(f"the reports say {', '.join(sorted(kinds)) or 'nothing'}, not {fault.kind or 'nothing'}")
    said = scene.said()
    wrong += [f"nobody said '{words}'" for words in fault.says if words not in said]


def _passed_over(scene: Scene) -> frozenset[int]:
    """Steps whose data the guard left out, as the record says."""
    rollbacks = [line["skipped"] for line in _record(scene) if line.get("event") == "rollback"]
    return frozenset(rollbacks[-1]) if rollbacks else frozenset()


def _losses(scene: Scene) -> dict[int, str]:
    return {step: repr(values["loss"]) for step, values in read_steps(scene.run_directory / "record.jsonl").items()}


def _record(scene: Scene) -> list[dict[str, Any]]:
    path = scene.run_directory / "record.jsonl"
    return list(read_lines(path)) if path.exists() else []


def _line(row: Row) -> str:
    return f"{row.fault}: {_verdict(row)}" + (f", back after {row.recovered:.1f} s" if row.recovered else "")


def _verdict(row: Row) -> str:
    if row.skipped is not None:
        return f"left out: {row.skipped}"
    return "; ".join(row.problems) or "survived"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
