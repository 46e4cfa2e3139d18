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

from zero2all.console import sanitize
from zero2all.track.health_checks import HealthFinding, check_health
from zero2all.track.record_reader import Array
from zero2all.track.run_view import RunStatus, RunView, error_message
from zero2all.track.step_text import step_line
from zero2all.units import show_count

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
COLOURS = {"good": "green", "note": "yellow", "bad": "red"}
PLOTTED_METRICS = ("loss", "lr", "grad_norm", "tokens_per_second")
REFRESH_SECONDS = 1.0
HEALTH_CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class CheckedStatus(RunStatus):
    """What ``--once --json`` prints for a run."""

    verdicts: list[HealthFinding] = field(default_factory=list)


@dataclass(frozen=True)
class FailedStatus:
    """The same for a run that cannot be shown."""

    name: str
    trouble: str
    verdicts: list[HealthFinding] = field(default_factory=list)


def checked_status(run: RunView) -> CheckedStatus | FailedStatus:
    try:
        return CheckedStatus(**vars(run.status()), verdicts=safe_check_health(run))
    except Exception as error:  # the other runs are still shown
        return FailedStatus(run.name, error_message(error))


def health_report_lines(run: RunView) -> list[str]:
    """What ``--once`` prints for a run. Names and reasons come from files, so escape sequences are removed."""
    return [sanitize(line) for line in _health_report_lines(run)]


def _health_report_lines(run: RunView) -> list[str]:
    try:
        status = run.status()
    except Exception as error:
        return [f"{run.name}: {error_message(error)}"]
    lines = [f"{run.name}: {_progress_line(status)}  ({status.ended or 'running'})"]
    if status.trouble:
        lines.append(f"  cannot be read: {status.trouble}")
    lines += [f"  [{finding.level}] {finding.rule}: {finding.text}" for finding in safe_check_health(run)]
    return lines if len(lines) > 1 else [*lines, "  no problems found"]


def _progress_line(status: RunStatus) -> str:
    """As the log of training prints it."""
    if status.step is None:
        return "no step yet"
    return step_line(status.step + 1, status.steps, status.latest, status.seconds_left)


def watch_terminal(runs: list[RunView], console: Console) -> None:
    """Refresh until Ctrl-C, or until every run has ended."""
    findings: dict[str, list[HealthFinding]] = {}
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


def safe_check_health(run: RunView) -> list[HealthFinding]:
    """The findings on a run. A failing check becomes a finding, so that the other runs are still shown."""
    try:
        return check_health(run)
    except Exception as error:
        return [HealthFinding("check failed", "bad", error_message(error), error_message(error))]


def _safe_panel(run: RunView, findings: list[HealthFinding], width: int) -> Panel:
    try:
        return _panel(run, findings, width)
    except Exception as error:
        return Panel(Text(sanitize(error_message(error)), style="red"), title=escape(run.name))


def _panel(run: RunView, findings: list[HealthFinding], width: int) -> Panel:
    status = run.status()
    head = Text(_progress_line(status))
    if status.trouble:
        head.append(sanitize(f"  {status.trouble}"), style="red")
    half = max(20, (width - 8) // 2)
    plots = [
        _titled_plot(name, run.table([name], points=2 * half).mean[name], half)
        for name in PLOTTED_METRICS
        if name in run.readers[0].names
    ]
    grid = Table.grid(padding=(0, 2))
    for left, right in zip_longest(plots[::2], plots[1::2], fillvalue=Group()):
        grid.add_row(left, right)
    finding_lines = [
        Text(sanitize(f"● {finding.rule}: {finding.text}"), style=COLOURS[finding.level]) for finding in findings
    ]
    return Panel(Group(head, grid, *finding_lines), title=escape(run.name))


def _titled_plot(name: str, values: Array, width: int) -> Group:
    valid = values[np.isfinite(values)]
    if not len(valid):
        return Group(Text(name))
    low, high = float(valid.min()), float(valid.max())
    return Group(
        Text(f"{name}  {show_count(float(valid[-1]))}  ({show_count(low)} to {show_count(high)})", style="bold"),
        Text(braille_plot(values, width, 6)),
    )


def braille_plot(values: Array, width: int, height: int) -> str:
    """A curve in braille, 2 x 4 dots per character."""
    valid = values[np.isfinite(values)]
    if not len(valid):
        return ""
    low, high = float(valid.min()), float(valid.max())
    cells = np.zeros((height, width), dtype=int)
    columns = np.interp(np.arange(2 * width), np.linspace(0, 2 * width - 1, len(valid)), valid)
    shares = np.full(2 * width, 0.5) if high == low else (columns - low) / (high - low)
    rows = np.round((1 - shares) * (4 * height - 1)).astype(int)
    for column, row in enumerate(rows):
        before = rows[max(0, column - 1)]
        for between in range(min(row, before + 1), max(row, before - 1) + 1):  # no gap where the curve is steep
            cells[between // 4, column // 2] |= DOTS[between % 4][column % 2]
    return "\n".join("".join(chr(0x2800 + int(cell)) for cell in line) for line in cells)
