"""``z2a watch --tty`` and ``--once``: the same runs for those with only a shell."""

from __future__ import annotations

import time
from itertools import zip_longest

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zero2all.console import plain
from zero2all.track.stream import Array
from zero2all.track.verdicts import Verdict, judge
from zero2all.track.watched import WatchedRun, reason
from zero2all.units import show_count, show_seconds

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
COLOURS = {"good": "green", "note": "yellow", "bad": "red"}
SHOWN = ("loss", "lr", "grad_norm", "tokens_per_second")
EVERY = 1.0
JUDGE_EVERY = 5.0


def verdict_lines(run: WatchedRun) -> list[str]:
    """What ``--once`` prints of a run; names and reasons come from files, and a terminal must not obey them."""
    return [plain(line) for line in _verdict_lines(run)]


def _verdict_lines(run: WatchedRun) -> list[str]:
    try:
        status = run.status()
    except Exception as error:
        return [f"{run.name}: {reason(error)}"]
    at = "no step yet" if run.last_step is None else f"step {run.last_step + 1}"
    of = f" of {run.total_steps}" if run.total_steps else ""
    latest = ", ".join(f"{name} {value:.5g}" for name, value in status["latest"].items())
    how = status["ended"] or (f"{show_seconds(status['seconds_left'])} left" if status["seconds_left"] else "running")
    lines = [f"{run.name}: {at}{of}, {latest or 'nothing recorded'} ({how})"]
    if status["trouble"]:
        lines.append(f"  cannot be read just now: {status['trouble']}")
    lines += [f"  [{verdict.level}] {verdict.rule}: {verdict.text}" for verdict in judged(run)]
    return lines if len(lines) > 1 else [*lines, "  nothing to remark"]


def watch_terminal(runs: list[WatchedRun], console: Console) -> None:
    """Until Ctrl-C, or until every run has ended."""
    verdicts: dict[str, list[Verdict]] = {}
    due = 0.0
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            for run in runs:
                run.refresh()
            if time.monotonic() > due:
                verdicts = {run.name: judged(run) for run in runs}
                due = time.monotonic() + JUDGE_EVERY
            live.update(Group(*(_panel_or_trouble(run, verdicts[run.name], console.width) for run in runs)))
            if all(run.ended for run in runs):
                return
            time.sleep(EVERY)


def judged(run: WatchedRun) -> list[Verdict]:
    """The verdicts on a run. That it cannot be judged is one of them, and keeps no other run from being shown."""
    try:
        return judge(run)
    except Exception as error:
        return [Verdict("not judged", "bad", reason(error), reason(error))]


def _panel_or_trouble(run: WatchedRun, verdicts: list[Verdict], width: int) -> Panel:
    try:
        return _panel(run, verdicts, width)
    except Exception as error:
        return Panel(Text(plain(reason(error)), style="red"), title=escape(run.name))


def _panel(run: WatchedRun, verdicts: list[Verdict], width: int) -> Panel:
    status = run.status()
    head = Text(f"step {0 if run.last_step is None else run.last_step + 1}/{run.total_steps or '?'}  ")
    head.append("  ".join(f"{name} {value:.5g}" for name, value in status["latest"].items()))
    if status["seconds_left"]:
        head.append(f"  left {show_seconds(status['seconds_left'])}")
    if status["trouble"]:
        head.append(plain(f"  {status['trouble']}"), style="red")
    half = max(20, (width - 8) // 2)
    plots = [
        _titled(name, run.table([name], points=2 * half).mean[name], half)
        for name in SHOWN
        if name in run.streams[0].names
    ]
    grid = Table.grid(padding=(0, 2))
    for left, right in zip_longest(plots[::2], plots[1::2], fillvalue=Group()):
        grid.add_row(left, right)
    said = [Text(plain(f"● {one.rule}: {one.text}"), style=COLOURS[one.level]) for one in verdicts]
    return Panel(Group(head, grid, *said), title=escape(run.name))


def _titled(name: str, values: Array, width: int) -> Group:
    there = values[np.isfinite(values)]
    if not len(there):
        return Group(Text(name))
    low, high = float(there.min()), float(there.max())
    return Group(
        Text(f"{name}  {show_count(float(there[-1]))}  ({show_count(low)} to {show_count(high)})", style="bold"),
        Text(braille(values, width, 6)),
    )


def braille(values: Array, width: int, height: int) -> str:
    """A curve of dots, two across and four down in each character."""
    there = values[np.isfinite(values)]
    if not len(there):
        return ""
    low, high = float(there.min()), float(there.max())
    cells = np.zeros((height, width), dtype=int)
    columns = np.interp(np.arange(2 * width), np.linspace(0, 2 * width - 1, len(there)), there)
    shares = np.full(2 * width, 0.5) if high == low else (columns - low) / (high - low)
    rows = np.round((1 - shares) * (4 * height - 1)).astype(int)
    for column, row in enumerate(rows):
        before = rows[max(0, column - 1)]
        for between in range(min(row, before + 1), max(row, before - 1) + 1):  # no gap where it is steep
            cells[between // 4, column // 2] |= DOTS[between % 4][column % 2]
    return "\n".join("".join(chr(0x2800 + int(cell)) for cell in line) for line in cells)
