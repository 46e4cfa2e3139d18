"""What a person sees: one console on stderr, so that stdout stays free for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

console = Console(stderr=True, soft_wrap=True, highlight=False)


def say(message: str) -> None:
    """A line of plain text; nothing in it is read as markup."""
    console.print(escape(message), emoji=False)


def warn(message: str) -> None:
    console.print(f"[yellow]warning:[/yellow] {escape(message)}", emoji=False)


def heading(message: str) -> None:
    console.print(f"[bold cyan]{escape(message)}[/bold cyan]", emoji=False)


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal; the yielded function advances it. In a log file it is silent: stages say when they end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda amount: bar.advance(task, amount)
