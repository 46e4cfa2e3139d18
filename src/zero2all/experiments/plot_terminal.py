"""A plot in braille characters."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from zero2all.console import sanitize
from zero2all.experiments.plots import show_value, x_position
from zero2all.track.experiment_record import Plot
from zero2all.track.terminal import DOTS

COLOURS = ("blue", "yellow", "green", "red", "magenta", "cyan", "white")
POINT = "●"
LABEL_WIDTH = 9  # of the y axis


def plot_text(plot: Plot, width: int = 72, height: int = 12) -> Text:
    """Title, curves with the range of both axes, and a legend if there are several."""
    places = [place for curve in plot.curves for place in (*curve.line, *curve.points)]
    xs, ys = [x_position(plot, x) for x, _ in places], [y for _, y in places]
    low, high = min(ys), max(ys)
    columns, rows = 2 * width - 1, 4 * height - 1
    cells = np.zeros((height, width), dtype=int)
    styles: dict[tuple[int, int], str] = {}
    marks: set[tuple[int, int]] = set()

    def dot(x: float, y: float) -> tuple[int, int]:
        across = (x_position(plot, x) - min(xs)) / (max(xs) - min(xs)) if max(xs) > min(xs) else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return round((1 - up) * rows), round(across * columns)

    for curve in plot.curves:
        style = COLOURS[curve.colour % len(COLOURS)]
        dots = [dot(x, y) for x, y in curve.line]
        for (row, column), (next_row, next_column) in zip(dots, dots[1:] or dots, strict=False):
            length = max(abs(next_row - row), abs(next_column - column), 1)
            for share in np.linspace(0, 1, length + 1):
                y, x = round(row + share * (next_row - row)), round(column + share * (next_column - column))
                cells[y // 4, x // 2] |= DOTS[y % 4][x % 2]
                styles[y // 4, x // 2] = style
        for row, column in (dot(x, y) for x, y in curve.points):
            marks.add((row // 4, column // 2))
            styles[row // 4, column // 2] = style
    text = Text(f"{sanitize(plot.title)}\n", style="default")
    for row in range(height):
        label = f"{high:.4g}" if row == 0 else f"{low:.4g}" if row == height - 1 else ""
        text.append(f"{label:>{LABEL_WIDTH}} │")
        for column in range(width):
            character = POINT if (row, column) in marks else chr(0x2800 + int(cells[row, column]))
            text.append(character, style=styles.get((row, column), ""))
        text.append("\n")
    text.append(_x_axis(plot, width))
    if len(plot.curves) > 1:
        for curve in plot.curves:
            text.append(f"\n{'':{LABEL_WIDTH}}   ")
            text.append(f"⠒⠒ {sanitize(curve.label)}", style=COLOURS[curve.colour % len(COLOURS)])
    return text


def _x_axis(plot: Plot, width: int) -> str:
    places = [x for curve in plot.curves for x, _ in curve.line]
    first, last = (
        (plot.categories[0], plot.categories[-1]) if plot.categories else map(show_value, (min(places), max(places)))
    )
    name = f"{plot.x_label}{' (log)' if plot.log_x else ''}"
    gap = max(1, (width - len(first) - len(last) - len(name)) // 2)
    axis = f"{first}{' ' * gap}{name}{' ' * gap}{last}"
    return sanitize(f"{'':{LABEL_WIDTH}} └{'─' * width}\n{'':{LABEL_WIDTH}}  {axis}")
