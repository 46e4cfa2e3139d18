"""Console output: everything goes to stderr, so that stdout stays free for results."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from zero2all.base.redact import redact
from zero2all.base.units import show_bytes, show_seconds

LOG_INTERVAL = 5.0  # seconds between lines of progress in a log file

# Control characters except tab and line feed, and those that change the text direction.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
console = Console(stderr=True, soft_wrap=True, highlight=False)
_every_rank_console = Console(stderr=True, soft_wrap=True, highlight=False)
_is_verbose = False


def set_verbose(*, on: bool) -> None:
    """Whether ``say_detail`` prints: the option ``--verbose``."""
    global _is_verbose
    _is_verbose = on


def sanitize(text: str) -> str:
    """Text that is safe to show: secrets in URLs redacted, terminal control characters escaped."""
    return redact(text).translate(_CONTROLS)


def say(message: str) -> None:
    """Print a line of plain text; nothing in it is parsed as markup."""
    console.print(escape(sanitize(message)), emoji=False)


def say_detail(message: str) -> None:
    """Print a line only with ``--verbose``."""
    if _is_verbose:
        say(message)


def warn(message: str, *, every_rank: bool = False) -> None:
    """``every_rank``: print also where the console is quiet, for warnings that concern a single rank."""
    (_every_rank_console if every_rank else console).print(
        f"[yellow]warning:[/yellow] {escape(sanitize(message))}", emoji=False
    )


def wrap(text: str, columns: int) -> list[str]:
    """The lines of a text for a terminal, broken between words, or between Chinese characters, which are two wide."""
    return [line.plain.rstrip() for line in Text(text).wrap(console, columns)]


def heading(message: str) -> None:
    console.print(f"[bold cyan]{escape(sanitize(message))}[/bold cyan]", emoji=False)


class ProgressTask(Protocol):
    """Progress that is shown; a call advances it."""

    def __call__(self, amount: float) -> None: ...

    def describe(self, title: str, total: float | None = None) -> None:
        """Replace the title, and the total if it is known only now."""


@contextmanager
def progress(
    title: str, total: float | None = None, *, is_transfer: bool = False, delay: float = 0.0
) -> Iterator[ProgressTask]:
    """A progress bar on a terminal, a line every few seconds in a log file.

    ``is_transfer``: the amounts are bytes, and their rate is shown. Nothing is shown before ``delay`` seconds.
    """
    if console.is_terminal:
        transfer: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn()) if is_transfer else ()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            *transfer,
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=console, transient=True)
        timer = threading.Timer(delay, bar.start)
        (timer if delay else bar).start()
        try:
            yield _ProgressBar(bar, title, total)
        finally:
            timer.cancel()
            if delay:
                timer.join()
            bar.stop()
        return
    log = _ProgressLog(title, total, is_transfer=is_transfer, delay=delay)
    thread = threading.Thread(target=log.print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        log.closed.set()
        thread.join()


class _ProgressBar:
    def __init__(self, bar: Progress, title: str, total: float | None) -> None:
        self._bar, self._task = bar, bar.add_task(escape(sanitize(title)), total=total)

    def __call__(self, amount: float) -> None:
        self._bar.advance(self._task, amount)

    def describe(self, title: str, total: float | None = None) -> None:
        self._bar.update(self._task, description=escape(sanitize(title)), total=total)


class _ProgressLog:
    """Prints lines from a thread, because a task may take minutes before it advances."""

    def __init__(self, title: str, total: float | None, *, is_transfer: bool = False, delay: float = 0.0) -> None:
        self.title, self.total, self.is_transfer, self.done = title, total, is_transfer, 0.0
        self.delay = delay or LOG_INTERVAL
        self.closed = threading.Event()
        self._started = time.monotonic()

    def __call__(self, amount: float) -> None:
        self.done += amount

    def describe(self, title: str, total: float | None = None) -> None:
        self.title, self.total = title, total or self.total

    def print_lines(self) -> None:
        wait = self.delay
        while not self.closed.wait(wait):
            say(self.line(self._elapsed()))
            wait = max(LOG_INTERVAL, 0.05 * self._elapsed())  # a log of hours stays short

    def line(self, elapsed: float) -> str:
        transfer = f"{show_bytes(self.done)}, {show_bytes(self.done / elapsed)}/s, " if self.is_transfer else ""
        if not self.total or self.done <= 0:
            return f"{self.title}: {transfer}{show_seconds(elapsed)} so far"
        share = min(1.0, self.done / self.total)
        return f"{self.title}: {100 * share:.0f}%, {transfer}{show_seconds(elapsed * (1 - share) / share)} left"

    def _elapsed(self) -> float:
        return time.monotonic() - self._started
