"""A read-only view of a run: the records of all ranks, metadata, status, and what was planned beside it."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import computed_field

from zero2all.base.errors import Z2aError
from zero2all.base.units import show_bytes
from zero2all.track.eval_record import EvalCurve, EvalReader
from zero2all.track.record_lines import RESTART_EVENTS, EventLine, HistogramLine, LoggedLine, SampleLine, is_count
from zero2all.track.record_reader import Array, MetricTable, RecordReader
from zero2all.track.run_locations import EVALS_FILE, METADATA_FILES, RECORD_FILE, LocalRunLocation, RunLocation
from zero2all.track.run_metadata import PlannedRun, PlannedValue, RunMetadata, read_run_metadata

RANK_RECORD_PATTERN = re.compile(r"record\.rank([0-9]+)\.jsonl")
HEADLINE_METRICS: tuple[str, ...] = ("loss", "tokens_per_second", "mfu", "tokens")
END_EVENTS = ("done", "stopped", "not finite", "failure")


@dataclass(frozen=True)
class RunStatus:
    """The headline metrics, progress and health of a run."""

    name: str
    step: int | None = None
    steps: int | None = None
    """Number of steps in the whole run."""
    time: float | None = None
    """Time of the last step."""
    latest: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    seconds_left: float | None = None
    goodput: float | None = None
    ended: str | None = None
    trouble: str | None = None
    """Why it cannot be read or shown."""
    damage: list[str] = field(default_factory=list)


class RunView:
    """
    >>> run = RunView(LocalRunLocation(Path("runs/first/run")))
    >>> run.refresh()
    >>> run.table(["loss"], points=1500).mean["loss"]
    """

    def __init__(self, location: RunLocation) -> None:
        self.location, self.name = location, location.name
        self.readers = {0: RecordReader(location, RECORD_FILE)}
        self.evals = EvalReader(location)
        self.metadata = RunMetadata()
        self.read_error: str | None = None  # why the location cannot be read at the moment
        self._metadata_sizes: dict[str, int] = {}

    def refresh(self) -> bool:
        """Read what is new. Returns whether anything changed. Never raises: a failure becomes ``read_error``."""
        before, self.read_error = self.read_error, None
        changed = False
        try:
            sizes = self.location.file_sizes()
        except Exception as error:
            self.read_error = error_message(error)
            return self.read_error != before
        for file in sizes:
            if match := RANK_RECORD_PATTERN.fullmatch(file):
                self.readers.setdefault(int(match[1]), RecordReader(self.location, file))
        refreshes = (self.evals.refresh, *(reader.refresh for reader in self.readers.values()))
        for update in (self._read_metadata, *refreshes):
            try:
                changed = update(sizes) or changed
            except Exception as error:  # the other files and runs are still shown
                self.read_error = error_message(error)
        return changed or self.read_error != before

    def read_to_end(self, seconds: float = 300.0) -> None:
        """Read everything, which may take several refreshes."""
        until = time.monotonic() + seconds
        read = -1
        while (now := sum(reader.read_offset for reader in self.readers.values())) > read:
            if time.monotonic() > until:
                self.read_error = f"only the first {show_bytes(now)} were read in {seconds:.0f} s"
                return
            read = now
            self.refresh()

    @property
    def damage(self) -> list[str]:
        """The invalid parts of the run's files, and where each begins."""
        damage = list(self.metadata.damage)
        for reader in self.readers.values():
            for file, where in reader.damage.items():
                lines = "1 line skipped" if reader.skipped_lines == 1 else f"{reader.skipped_lines} lines skipped"
                what = f"{lines}, the first at" if file == reader.file else "not used past"
                damage.append(f"{file}: {what} {where}")
        if self.evals.damage:
            damage.append(f"{EVALS_FILE}: {self.evals.skipped_lines} lines skipped, the first at {self.evals.damage}")
        return damage

    @property
    def names(self) -> list[str]:
        """Metric names: rank 0 without a suffix, rank r as ``name@r``, then the evaluations."""
        recorded = [
            name if rank == 0 else f"{name}@{rank}"
            for rank, reader in sorted(self.readers.items())
            for name in reader.names
        ]
        return [*recorded, *self.validation_table().mean, *(curve.metric_name for curve in self.eval_curves())]

    @property
    def events(self) -> list[EventLine]:
        return self.readers[0].events

    @property
    def last_step(self) -> int | None:
        return self.readers[0].last_step

    @property
    def total_steps(self) -> int | None:
        starts = [event.details.get("steps") for event in self.events if event.event in RESTART_EVENTS]
        return next((steps for steps in reversed(starts) if is_count(steps)), None)

    @property
    def ended(self) -> str | None:
        """How it ended, if it did."""
        last = [event.event for event in self.events if event.event in (*END_EVENTS, *RESTART_EVENTS)][-1:]
        return last[0] if last and last[0] in END_EVENTS else None

    def table(
        self, names: list[str], first: float = -math.inf, last: float = math.inf, points: int = 10**9, rank: int = 0
    ) -> MetricTable:
        return self.readers[rank].table(names, first, last, points)

    def finite_values(self, name: str, points: int = 10**9, rank: int = 0) -> Array:
        """The finite values of one metric, in step order."""
        values = self.table([name], points=points, rank=rank).mean[name]
        return values[np.isfinite(values)]

    def validation_table(self, first: float = -math.inf, last: float = math.inf) -> MetricTable:
        """Bits per byte, one row per evaluation: ``validation/all``, then a column per source and per test set."""
        rows = [(event.step, event) for event in _validations(self.events) if event.step is not None]
        rows = [(step, event) for step, event in rows if first <= step <= last]
        by_name: dict[str, list[float]] = {}
        for number, (_, event) in enumerate(rows):
            for name, value in _validation_values(event).items():
                by_name.setdefault(f"validation/{name}", [math.nan] * len(rows))[number] = value
        return MetricTable(
            np.array([step for step, _ in rows], dtype=np.float64),
            np.array([event.time or 0.0 for _, event in rows], dtype=np.float64),
            {name: np.array(column) for name, column in by_name.items()},
        )

    def latest_validation(self) -> dict[str, float]:
        """Bits per byte of the newest validation: of ``all``, of each source and of each test set."""
        return next((_validation_values(event) for event in reversed(_validations(self.events))), {})

    def eval_curves(self) -> list[EvalCurve]:
        """The evaluations of its checkpoints, without those that it abandoned when it resumed from an earlier one."""
        return self.evals.curves(self.events)

    def status(self) -> RunStatus:
        wanted = [name for name in HEADLINE_METRICS if name in self.readers[0].names]
        recent = self.table(wanted, first=(self.last_step or 0) - 200)
        latest = {name: _last(recent.mean[name]) for name in wanted}
        seconds = _step_seconds(recent)
        left = None
        if self.total_steps is not None and self.last_step is not None and seconds is not None and self.ended is None:
            left = max(0, self.total_steps - self.last_step - 1) * seconds
        return RunStatus(
            name=self.name,
            step=self.last_step,
            steps=self.total_steps,
            time=float(recent.times[-1]) if len(recent.times) else None,
            latest={name: value for name, value in latest.items() if value is not None},
            step_seconds=seconds,
            seconds_left=left,
            goodput=_goodput(self),
            ended=self.ended,
            trouble=self.read_error,
            damage=self.damage,
        )

    def tokens_at(self, table: MetricTable) -> list[float] | None:
        """Tokens seen at each row, from the record or else from the recipe."""
        if "tokens" in table.mean:
            return [float(value) for value in table.mean["tokens"]]
        if self.metadata.batch_tokens is None:
            return None
        return [(float(step) + 1) * self.metadata.batch_tokens for step in table.steps]

    def logged_line(self, logged: LoggedLine) -> SampleLine | HistogramLine | None:
        return self.readers[0].read_logged_line(logged)

    def logged_steps(self, kind: str = "sample") -> dict[str, list[int]]:
        """Steps that have samples (or histograms), by name."""
        steps: dict[str, list[int]] = {}
        for logged in sorted(self.readers[0].pointers, key=lambda logged: (logged.name, logged.step)):
            if logged.kind == kind:
                steps.setdefault(logged.name, []).append(logged.step)
        return steps

    def _read_metadata(self, sizes: dict[str, int]) -> bool:
        wanted = {name: size for name, size in sizes.items() if name in METADATA_FILES}
        if wanted == self._metadata_sizes:
            return False
        self.metadata = read_run_metadata(self.location, wanted)
        self._metadata_sizes = wanted
        return True


def read_run_view(directory: Path) -> RunView:
    """A run of this machine, read to its end."""
    view = RunView(LocalRunLocation(directory))
    view.read_to_end()
    return view


def error_message(error: Exception) -> str:
    """Why a run cannot be read or checked, in one line."""
    return str(error) if isinstance(error, Z2aError) else f"this is a bug in zero2all: {type(error).__name__}: {error}"


def _goodput(run: RunView) -> float | None:
    """Fraction of the time since the first start that was spent on steps that count.

    The run records it at its end. Before that, it is estimated from the median step time.
    """
    recorded = [event.details.get("goodput") for event in run.events if event.event == "goodput"]
    if recorded and recorded[-1] is not None and run.ended is not None:
        return float(recorded[-1])
    steps, times = run.readers[0].step_times()
    starts = [event.time for event in run.events if event.event == "start" and event.time is not None]
    moved = np.diff(steps) > 0
    if not moved.any():
        return None
    pace = float(np.median(np.diff(times)[moved] / np.diff(steps)[moved]))
    elapsed = float(times[-1]) - (starts[0] if starts else float(times[0]))
    return min(1.0, pace * (float(steps[-1] - steps[0]) + 1) / elapsed) if elapsed > 0 else None


def _validations(events: list[EventLine]) -> list[EventLine]:
    return [
        event
        for event in events
        if event.event == "evaluation" and "bits_per_byte" in event.details and event.step is not None
    ]


def _validation_values(event: EventLine) -> dict[str, float]:
    """Bits per byte by name: ``all``, then the sources and the test sets."""
    sources, tests = event.details.get("sources", {}), event.details.get("test_sets", {})
    by_source = {f"{name} (source)" if name == "all" else name: section for name, section in sources.items()}
    by_test = {f"{name} (test set)": section for name, section in tests.items()}
    sections = {"all": event.details, **by_source, **by_test}
    return {name: section["bits_per_byte"] for name, section in sections.items()}


def _last(column: Any) -> float | None:
    valid = column[np.isfinite(column)]
    return float(valid[-1]) if len(valid) else None


def _step_seconds(table: MetricTable) -> float | None:
    if len(table.steps) < 2:
        return None
    return float(np.median(np.diff(table.times) / np.maximum(np.diff(table.steps), 1)))


WARMUP_SHARE = 0.1  # of the steps, left out


@dataclass(frozen=True)
class PlanCheck:
    """One value, planned and measured."""

    name: str
    unit: str
    planned: float
    measured: float
    note: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float:
        """Ratio of the measured to the planned value."""
        return self.measured / self.planned if self.planned else math.nan


def compare_with_run(planned: PlannedRun, view: RunView) -> list[PlanCheck]:
    """Medians over the steps after warm-up, or the most of any rank; without what the run did not measure."""
    checks = []
    for value in planned.values:
        measured = _most(view, value) if value.over == "most" else _median(view, value)
        if measured is not None:
            checks.append(PlanCheck(value.name, value.unit, value.planned, measured / value.scale, value.note))
    return checks


def run_checks(view: RunView) -> list[PlanCheck]:
    """Compare a run with the plan in its directory; without a plan, there are no checks."""
    return compare_with_run(view.metadata.plan, view) if view.metadata.plan is not None else []


def _median(view: RunView, value: PlannedValue) -> float | None:
    values = view.table([value.metric]).mean[value.metric]
    values = values[int(WARMUP_SHARE * len(values)) :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _most(view: RunView, value: PlannedValue) -> float | None:
    ranks = (view.finite_values(value.metric, rank=rank) for rank in view.readers)
    return max((float(values.max()) for values in ranks if len(values)), default=None)
