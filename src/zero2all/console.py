"""What a person sees: one console on stderr, so that stdout stays free for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zero2all.masking import mask

# Control characters but tab and line feed, and those that turn the direction of writing.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
console = Console(stderr=True, soft_wrap=True, highlight=False)
_never_quiet = Console(stderr=True, soft_wrap=True, highlight=False)


def plain(text: str) -> str:
    """Text as it may be shown: secrets of URLs masked, and what a terminal would obey spelled out."""
    return mask(text).translate(_CONTROLS)


def say(message: str) -> None:
    """A line of plain text; nothing in it is read as markup."""
    console.print(escape(plain(message)), emoji=False)


def warn(message: str, every_rank: bool = False) -> None:
    """``every_rank``: also where the console is quiet, for what concerns one rank alone."""
    (_never_quiet if every_rank else console).print(f"[yellow]warning:[/yellow] {escape(plain(message))}", emoji=False)


def heading(message: str) -> None:
    console.print(f"[bold cyan]{escape(plain(message))}[/bold cyan]", emoji=False)


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal; the yielded function advances it. In a log file it is silent: stages say when they end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(plain(title)), total=total)
        yield lambda amount: bar.advance(task, amount)
