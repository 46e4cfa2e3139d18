"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from zero2all.track.experiment_record import GroupSummary

UNKNOWN = "–"


def show_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by their width on a terminal: the first to the left, the others to the right."""
    widths = [max(cell_len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths[: len(row)], strict=True)]
        cells = [row[0] + gaps[0], *(gap + cell for cell, gap in zip(row[1:], gaps[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show_bits(group: GroupSummary) -> str:
    """The mean over seeds, and their standard deviation if it is known."""
    spread = f" ± {group.spread:.4f}" if group.spread is not None else ""
    return UNKNOWN if group.bits_per_byte is None else f"{group.bits_per_byte:.4f}{spread}"
