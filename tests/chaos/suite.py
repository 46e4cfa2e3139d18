"""Run the faults, one after another or several at a time, and compare each job with a baseline job without faults."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import SubprocessError

from tests.chaos.fault import Fault
from tests.chaos.faults import FAULTS
from tests.chaos.restore_audit import find_wrong_restores, read_restore_marks
from tests.chaos.sample_audit import audit_samples
from tests.chaos.scenario import Scenario, expect_status
from tests.chaos.workspace import build_workspace
from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_text
from zero2all.base.units import show_seconds
from zero2all.track import read_steps
from zero2all.track.record_lines import EventLine, RecordLine, StepLine, restart_step
from zero2all.track.run_record import read_record_lines

COLUMNS = ("fault", "detected s", "recovered s", "steps again", "samples lost", "samples repeated", "")


@dataclass
class FaultResult:
    """The outcome of one fault. Without problems the job survived it."""

    fault: str
    detected: float | None = None
    """Seconds from the fault until it was detected."""
    recovered: float | None = None
    """Seconds from the fault until the first step after it."""
    steps_again: int = 0
    lost: int = 0
    repeated: int = 0
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    """Why it could not be injected here."""
    cost: dict[str, float] | None = None
    """Breakdown of the recovery time, as the agent measured it."""


def select_faults(names: Sequence[str]) -> list[Fault]:
    """Those with these names; all of them without names."""
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        known = ", ".join(fault.name for fault in FAULTS)
        raise UsageError(f"no fault is called {', '.join(sorted(unknown))}; there are: {known}")
    return [fault for fault in FAULTS if not names or fault.name in names]


def part_of_faults(faults: list[Fault], part: str) -> list[Fault]:
    """Part 2/3 is every third fault from the second on, since similar faults are neighbors in the list."""
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise UsageError(f"--part {part!r}: write I/N, such as 2/3")
    return faults[int(number) - 1 :: int(parts)]


def run_suite(out: Path, chosen: Sequence[Fault], seed: int = 0, jobs: int = 1) -> list[FaultResult]:
    """Inject faults, ``jobs`` at a time; the table in ``out`` is rewritten after each."""
    out = out.absolute()
    build_workspace(out / "workspace", seed)
    baselines: dict[tuple[str, ...], Baseline] = {}
    rows: list[FaultResult] = []
    for fault in chosen:
        if (loss_overrides := _loss_overrides(fault)) not in baselines:
            baselines[loss_overrides] = run_baseline(out, loss_overrides)
    begin, order = time.monotonic(), [fault.name for fault in chosen]

    def run(fault: Fault, live: LiveScenarios) -> FaultResult:
        return run_fault(out, fault, baselines[_loss_overrides(fault)], seed, live)

    with closing(_run_rows(chosen, run, jobs)) as finished:
        for row in finished:
            rows.append(row)
            taken = time.monotonic() - begin
            left = taken / len(rows) * (len(chosen) - len(rows))
            ending = f"about {show_seconds(left)} left" if left else f"all in {show_seconds(taken)}"
            say(f"{len(rows)}/{len(chosen)} {_summary_line(row)}; {ending}")
            rows.sort(key=lambda row: order.index(row.fault))
            write_text(out / "chaos.md", render_table(rows) + "\n")
    return rows


class LiveScenarios:
    """The scenarios that run at the moment, so that the end of the suite ends all of them."""

    def __init__(self) -> None:
        self._scenarios: set[Scenario] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def running(self, scenario: Scenario) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                scenario.terminate()
            self._scenarios.add(scenario)
        try:
            yield
        finally:
            scenario.terminate()
            with self._lock:
                self._scenarios.discard(scenario)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            scenarios = list(self._scenarios)
        for scenario in scenarios:
            scenario.terminate()


def _run_rows(
    faults: list[Fault], run: Callable[[Fault, LiveScenarios], FaultResult], jobs: int
) -> Generator[FaultResult]:
    """The rows, as they are done. A row is one thread, which mostly waits for its processes."""
    live = LiveScenarios()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, fault, live) for fault in faults]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # also Ctrl-C: nothing is left behind
            pool.shutdown(wait=False, cancel_futures=True)
            live.close()
            raise


def _loss_overrides(fault: Fault) -> tuple[str, ...]:
    """Those that change losses; settings of checkpoints do not."""
    return tuple(change for change in fault.overrides if change.startswith(("train.steps", "parallel")))


@dataclass(frozen=True)
class Baseline:
    """A job without faults: the exact loss of every step, and the duration."""

    losses: dict[int, str]
    seconds: float


def run_baseline(out: Path, overrides: tuple[str, ...]) -> Baseline:
    scenario = Scenario(out / "workspace", out / "baseline", [], overrides)
    begin = time.monotonic()
    try:
        expect_status(scenario.run(), 0)
        return Baseline(_losses(scenario), time.monotonic() - begin)
    finally:
        scenario.terminate()


def run_fault(out: Path, fault: Fault, baseline: Baseline, seed: int, live: LiveScenarios | None = None) -> FaultResult:
    row = FaultResult(fault.name)
    if (reason := fault.unavailable_reason()) is not None:
        row.skipped = reason
        return row
    rng = random.Random(f"{seed}/{fault.name}")
    scenario = Scenario(
        out / "workspace", out / fault.name.replace(" ", "-"), fault.injections(rng), fault.overrides, baseline.seconds
    )
    try:
        with (live or LiveScenarios()).running(scenario):
            fault.drive(scenario)
    except (Z2aError, OSError, SubprocessError) as error:  # the other faults are still worth running
        row.problems.append(str(error))
    _measure(row, scenario, fault)
    _check(row, scenario, fault, baseline.losses)
    return row


def render_table(rows: list[FaultResult]) -> str:
    """A Markdown table with one row per fault."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        cells = [
            row.fault, _seconds(row.detected), _seconds(row.recovered), row.steps_again, row.lost, row.repeated,
            _verdict(row),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _measure(row: FaultResult, scenario: Scenario, fault: Fault) -> None:
    triggered, reports = scenario.trigger_time(), scenario.reports()
    if triggered is None:
        row.problems.append("the fault was never triggered")
        return
    times = [report["time"] for report in reports] or [when for when, _ in scenario.exits]
    lines = [(line.time, line) for line in _record_lines(scenario) if line.time is not None]
    times += [when for when, line in lines if isinstance(line, EventLine) and line.event == "spike"]
    row.detected = next((when - triggered for when in sorted(times) if when > triggered), None)
    after = [(when, line) for when, line in lines if when > triggered]
    starts = [when for when, line in after if restart_step(line) is not None]
    steps = [when for when, line in after if isinstance(line, StepLine) and "loss" in line.metrics]
    row.recovered = next((when - triggered for when in steps if starts and when > starts[0]), None)
    row.cost = next((report["cost"] for report in reports if "cost" in report), None)


def _check(row: FaultResult, scenario: Scenario, fault: Fault, baseline_losses: dict[int, str]) -> None:
    """Check every guarantee; append those that do not hold to ``row.problems``."""
    problems = row.problems
    try:
        plan, skipped = scenario.open_run().plan(), _skipped_steps(scenario)
        audit = audit_samples(scenario.directory, plan, skipped)
        row.steps_again, row.lost, row.repeated = audit.steps_repeated, audit.samples_lost, audit.samples_repeated
        losses = _losses(scenario)
    except (Z2aError, OSError) as error:
        problems.append(f"the run cannot be read: {error}")
        return
    problems += find_wrong_restores(read_restore_marks(scenario.directory))
    if fault.max_steps_again is not None and row.steps_again > fault.max_steps_again:
        problems.append(f"{row.steps_again} steps were repeated, more than {fault.max_steps_again}")
    if row.lost or row.repeated:
        problems.append("not every sample was seen exactly once")
    if missing := set(range(plan.total_steps)) - set(losses) - skipped:
        problems.append(f"{len(missing)} steps are missing from the record")
    # After skipped data the runs diverge, so only the steps before it are compared.
    same = [step for step in losses if step < min(skipped, default=plan.total_steps)]
    max_difference = max((abs(float(baseline_losses[step]) - float(losses[step])) for step in same), default=0.0)
    if max_difference > fault.loss_tolerance or (
        not fault.loss_tolerance and any(losses[step] != baseline_losses[step] for step in same)
    ):
        problems.append(f"the losses differ from the baseline's by up to {max_difference:.1e}")
    kinds = {report["kind"] for report in scenario.reports()}
    if kinds - {fault.expected_kind, *fault.accepted_kinds} or (
        fault.expected_kind and fault.expected_kind not in kinds
    ):
        problems.append(
            f"the failure reports name {', '.join(sorted(kinds)) or 'nothing'}, not {fault.expected_kind or 'nothing'}"
        )
    log = scenario.log_text()
    problems += [f"the log lacks '{message}'" for message in fault.expected_messages if message not in log]


def _skipped_steps(scenario: Scenario) -> frozenset[int]:
    """Steps whose data the spike guard skipped, according to the record."""
    events = [line for line in _record_lines(scenario) if isinstance(line, EventLine)]
    rollbacks = [event.details["skipped"] for event in events if event.event == "rollback"]
    return frozenset(rollbacks[-1]) if rollbacks else frozenset()


def _losses(scenario: Scenario) -> dict[int, str]:
    return {step: repr(values["loss"]) for step, values in read_steps(scenario.run_dir / "record.jsonl").items()}


def _record_lines(scenario: Scenario) -> list[RecordLine]:
    path = scenario.run_dir / "record.jsonl"
    return list(read_record_lines(path)) if path.exists() else []


def _summary_line(row: FaultResult) -> str:
    return f"{row.fault}: {_verdict(row)}" + (f", recovered after {row.recovered:.1f} s" if row.recovered else "")


def _verdict(row: FaultResult) -> str:
    if row.skipped is not None:
        return f"skipped: {row.skipped}"
    return "; ".join(row.problems) or "survived"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
