"""Tables as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

UNKNOWN = "–"


def text_table(rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """Columns aligned by their width on a terminal: the first to the left, the others to the right or left too."""
    widths = [max(cell_len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            gap = " " * (widths[column] - cell_len(cell))
            cells.append(gap + cell if right and column else cell + gap)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]], align: str = "") -> str:
    """``align``: l or r for each column. Default: all to the left."""
    rule = ["---:" if side == "r" else "---" for side in align.ljust(len(head), "l")]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
