"""A plot as an SVG file: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from zero2all.experiments.plots import show_value, x_position
from zero2all.track.experiment_record import Plot
from zero2all.units import show_count

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a16207", "#64748b", "#84cc16")
WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60  # of the area around the curves
LEGEND_LINE = 18
MAX_TICKS = 8


class _Axes:
    """From values to places in the picture."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        points = [point for curve in plot.curves for point in (*curve.line, *curve.points)]
        self.xs = sorted({x for x, _ in points})
        positions, ys = [x_position(plot, x) for x, _ in points], [y for _, y in points]
        self.x_low, self.x_high = min(positions), max(positions)
        margin = 0.06 * (max(ys) - min(ys)) or 0.01
        self.y_low, self.y_high = min(ys) - margin, max(ys) + margin

    def x(self, x: float) -> float:
        span = self.x_high - self.x_low
        share = (x_position(self.plot, x) - self.x_low) / span if span else 0.5
        return LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24)

    def y(self, y: float) -> float:
        return TOP + (self.y_high - y) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[tuple[float, str]]:
        if self.plot.categories:
            return [(float(number), name) for number, name in enumerate(self.plot.categories)]
        if len(self.xs) <= MAX_TICKS:
            return [(x, show_value(x)) for x in self.xs]
        return [(x, show_count(x)) for x in round_ticks(self.xs[0], self.xs[-1])]


def plot_svg(plot: Plot) -> str:
    legend = plot.curves if len(plot.curves) > 1 else []
    height = HEIGHT + LEGEND_LINE * len(legend)
    parts = [*_frame(plot, _Axes(plot)), *_curves(plot, _Axes(plot))]
    for number, curve in enumerate(legend):
        y, colour = HEIGHT + LEGEND_LINE * number, COLOURS[curve.colour % len(COLOURS)]
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="16" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{y}">{escape(curve.label)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, Noto Sans CJK SC, sans-serif" font-size="12" fill="#222">'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _frame(plot: Plot, axes: _Axes) -> Iterator[str]:
    base = HEIGHT - BOTTOM
    yield f'<text x="{LEFT}" y="28" font-size="16">{escape(plot.title)}</text>'
    for y in round_ticks(axes.y_low, axes.y_high):
        at = axes.y(y)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e2e8f0"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:.6g}</text>'
    for x, name in axes.x_ticks():
        yield f'<text x="{axes.x(x):.1f}" y="{base + 20}" text-anchor="middle">{escape(name)}</text>'
    yield f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#888"/>'
    label = f"{plot.x_label}{' (log scale)' if plot.log_x else ''}"
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{base + 40}" text-anchor="middle">{escape(label)}</text>'


def _curves(plot: Plot, axes: _Axes) -> Iterator[str]:
    for curve in plot.curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in curve.line)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        for x, y in curve.points:
            title = f"{curve.label} {show_value(x)}: {y:.4f}".strip()
            yield (
                f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3.5" fill="{colour}" fill-opacity="0.6">'
                f"<title>{escape(title)}</title></circle>"
            )


def round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two values.

    >>> round_ticks(1.93, 2.11)
    [1.95, 2.0, 2.05, 2.1]
    """
    span = high - low
    if not span > 0:
        return [low]
    size = 10 ** math.floor(math.log10(span / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 6)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
