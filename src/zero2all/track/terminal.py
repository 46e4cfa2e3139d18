"""``z2a watch --tty`` and ``--once``: the dashboard in a terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zero2all.base.charts.plot import Curve, Plot
from zero2all.base.charts.terminal import LABEL_WIDTH, line_text
from zero2all.base.console import sanitize
from zero2all.base.findings import COLOURS, Finding
from zero2all.base.units import show_count
from zero2all.track.goodput import GoodputReport, compute_run_goodput, format_goodput
from zero2all.track.health_checks import check_health
from zero2all.track.record_reader import MetricTable
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunStatus, RunView, error_message
from zero2all.track.step_text import step_line

PLOTTED_METRICS = ("loss", "lr", "grad_norm", "tokens_per_second")
REFRESH_SECONDS = 1.0
HEALTH_CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class CheckedStatus(RunStatus):
    """What ``--once --json`` prints for a run."""

    verdicts: list[Finding] = field(default_factory=list)
    lost_time: GoodputReport | None = None
    """The lost time of a run on this machine."""


@dataclass(frozen=True)
class FailedStatus:
    """The same for a run that cannot be shown."""

    name: str
    trouble: str
    verdicts: list[Finding] = field(default_factory=list)


def checked_status(run: RunView) -> CheckedStatus | FailedStatus:
    try:
        return CheckedStatus(**vars(run.status()), verdicts=safe_check_health(run), lost_time=_goodput(run))
    except Exception as error:  # the other runs are still shown
        return FailedStatus(run.name, error_message(error))


def _goodput(run: RunView) -> GoodputReport | None:
    return compute_run_goodput(run.location.directory) if isinstance(run.location, LocalRunLocation) else None


def health_report_lines(run: RunView) -> list[str]:
    """What ``--once`` prints for a run. Names and reasons come from files, so escape sequences are removed."""
    return [sanitize(line) for line in _health_report_lines(run)]


def _health_report_lines(run: RunView) -> list[str]:
    try:
        status, goodput = run.status(), _goodput(run)
    except Exception as error:
        return [f"{run.name}: {error_message(error)}"]
    lines = [f"{run.name}: {_progress_line(status)}  ({status.ended or 'running'})"]
    lines += [] if goodput is None else [f"  {format_goodput(goodput)}"]
    if status.trouble:
        lines.append(f"  cannot be read: {status.trouble}")
    findings = [f"  {finding}".replace("\n", "\n  ") for finding in safe_check_health(run)]
    return lines + (findings or ([] if status.trouble else ["  no problems found"]))


def _progress_line(status: RunStatus) -> str:
    """The line that the log of training prints."""
    if status.step is None:
        return "no step yet"
    return step_line(status.step + 1, status.steps, status.latest, status.seconds_left)


def watch_terminal(runs: list[RunView], console: Console) -> None:
    """Refresh until Ctrl-C, or until every run has ended."""
    findings: dict[str, list[Finding]] = {}
    due = 0.0
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            for run in runs:
                run.refresh()
            if time.monotonic() > due:
                findings = {run.name: safe_check_health(run) for run in runs}
                due = time.monotonic() + HEALTH_CHECK_SECONDS
            live.update(Group(*(_safe_panel(run, findings[run.name], console.width) for run in runs)))
            if all(run.ended for run in runs):
                return
            time.sleep(REFRESH_SECONDS)


def safe_check_health(run: RunView) -> list[Finding]:
    """The findings on a run. A failing check becomes a finding, so that the other runs are still shown."""
    try:
        return check_health(run)
    except Exception as error:
        return [Finding("bad", "check failed", error_message(error))]


def _safe_panel(run: RunView, findings: list[Finding], width: int) -> Panel:
    try:
        return _panel(run, findings, width)
    except Exception as error:
        return Panel(Text(sanitize(error_message(error)), style="red"), title=escape(run.name))


def _panel(run: RunView, findings: list[Finding], width: int) -> Panel:
    status = run.status()
    head = Text(_progress_line(status))
    if status.trouble:
        head.append(sanitize(f"  {status.trouble}"), style="red")
    half = max(20, (width - 8) // 2)
    plots = [
        _metric_plot(name, run.table([name], points=2 * half), half - LABEL_WIDTH - 2)
        for name in PLOTTED_METRICS
        if name in run.readers[0].names
    ]
    grid = Table.grid(padding=(0, 2))
    for left, right in zip_longest(plots[::2], plots[1::2], fillvalue=Group()):
        grid.add_row(left, right)
    finding_lines = [
        Text(sanitize(f"● {finding.what}: {finding.text}"), style=COLOURS[finding.level]) for finding in findings
    ]
    return Panel(Group(head, grid, *finding_lines), title=escape(run.name))


def _metric_plot(name: str, table: MetricTable, width: int) -> Text:
    known = np.isfinite(table.mean[name])
    values = table.mean[name][known]
    if not len(values):
        return Text(name)
    line = list(zip(table.steps[known].round().tolist(), values.tolist(), strict=True))
    return line_text(Plot(f"{name}  {show_count(line[-1][1])}", "step", name, [Curve("", line)]), width, 5)
