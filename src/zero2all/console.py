"""Console output: everything goes to stderr, so that stdout stays free for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zero2all.redact import redact

# Control characters except tab and line feed, and those that change the text direction.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
console = Console(stderr=True, soft_wrap=True, highlight=False)
_every_rank_console = Console(stderr=True, soft_wrap=True, highlight=False)


def sanitize(text: str) -> str:
    """Text that is safe to show: secrets in URLs redacted, terminal control characters escaped."""
    return redact(text).translate(_CONTROLS)


def say(message: str) -> None:
    """Print a line of plain text; nothing in it is parsed as markup."""
    console.print(escape(sanitize(message)), emoji=False)


def warn(message: str, every_rank: bool = False) -> None:
    """``every_rank``: print also where the console is quiet, for warnings that concern a single rank."""
    (_every_rank_console if every_rank else console).print(
        f"[yellow]warning:[/yellow] {escape(sanitize(message))}", emoji=False
    )


def heading(message: str) -> None:
    console.print(f"[bold cyan]{escape(sanitize(message))}[/bold cyan]", emoji=False)


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal; the yielded function advances it. In a log file it is silent."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(sanitize(title)), total=total)
        yield lambda amount: bar.advance(task, amount)
