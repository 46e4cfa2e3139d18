"""Charts of characters: lines in braille, bars and columns in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.text import Text

from zero2all.base.charts.plot import Plot, colour
from zero2all.base.console import sanitize
from zero2all.base.units import show_number

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
COLUMN_BLOCKS, BAR_BLOCKS = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
MARKED, POINT = "▒", "●"
LABEL_WIDTH = 9  # of the y axis
Place = tuple[int, int]


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text: a block for each value, as high as the value between the lowest and the highest.

    >>> sparkline([3.0, 2.0, 1.5, 1.0])
    '█▄▂▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(
        COLUMN_BLOCKS[1 + round(7 * (value - low) / (high - low or 1.0))] if math.isfinite(value) else "?"
        for value in values
    )


def bar_text(share: float, width: int) -> str:
    """A bar of at most ``width`` characters, padded with blanks.

    >>> bar_text(0.3, 5)
    '█▌   '
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + BAR_BLOCKS[eighths % 8]).ljust(width)[:width]


def column_lines(shares: Sequence[float], height: int, marked: int = 0) -> list[str]:
    """A column for each value between 0 and 1, the first ``marked`` ones in a different shade."""
    heights = [round(share * height * 8) for share in shares]
    lines = []
    for row in reversed(range(height)):
        filled = [min(8, max(0, eighths - 8 * row)) for eighths in heights]
        first = "".join(MARKED if eighths >= 4 or (eighths and not row) else " " for eighths in filled[:marked])
        lines.append(first + "".join(COLUMN_BLOCKS[eighths] for eighths in filled[marked:]))
    return lines


def line_text(plot: Plot, width: int = 72, height: int = 12) -> Text:
    """Title, curves with the range of both axes, and a legend if there are several."""
    x_axis, y_axis = plot.axes()
    cells: dict[Place, int] = {}
    styles: dict[Place, str] = {}
    marks: set[Place] = set()

    def dot(x: float, y: float) -> Place:
        return round((1 - y_axis.share(y)) * (4 * height - 1)), round(x_axis.share(x) * (2 * width - 1))

    for curve in plot.curves:
        for row, column in _line_dots([dot(x, y) for x, y in curve.line]):
            cell = (row // 4, column // 2)
            cells[cell] = cells.get(cell, 0) | DOTS[row % 4][column % 2]
            styles[cell] = colour(curve.colour)
        for row, column in (dot(x, y) for x, y in curve.points):
            marks.add((row // 4, column // 2))
            styles[row // 4, column // 2] = colour(curve.colour)
    text = Text(f"{sanitize(plot.title)}\n", style="default")
    for row in range(height):
        label = show_number(y_axis.high, 4) if row == 0 else show_number(y_axis.low, 4) if row == height - 1 else ""
        text.append(f"{label:>{LABEL_WIDTH}} │")
        for place in ((row, column) for column in range(width)):
            text.append(POINT if place in marks else chr(0x2800 + cells.get(place, 0)), style=styles.get(place, ""))
        text.append("\n")
    text.append(_x_axis(plot, width))
    if len(plot.curves) > 1:
        for curve in plot.curves:
            text.append(f"\n{'':{LABEL_WIDTH}}   ")
            text.append(f"⠒⠒ {sanitize(curve.label)}", style=colour(curve.colour))
    return text


def _line_dots(corners: Sequence[Place]) -> Iterator[Place]:
    """All dots on the way from corner to corner: no gap where a curve is steep."""
    yield from corners[:1]
    for (row, column), (next_row, next_column) in pairwise(corners):
        length = max(abs(next_row - row), abs(next_column - column), 1)
        for done in range(1, length + 1):
            yield (
                round(row + done / length * (next_row - row)),
                round(column + done / length * (next_column - column)),
            )


def _x_axis(plot: Plot, width: int) -> str:
    axis, _ = plot.axes()
    ends = (plot.categories[0], plot.categories[-1]) if plot.categories else map(show_number, (axis.low, axis.high))
    first, last = ends
    name = f"{plot.x_label}{' (log)' if plot.log_x else ''}"
    gap = max(1, (width - len(first) - len(last) - len(name)) // 2)
    named = f"{first}{' ' * gap}{name}{' ' * gap}{last}"
    return sanitize(f"{'':{LABEL_WIDTH}} └{'─' * width}\n{'':{LABEL_WIDTH}}  {named}")
