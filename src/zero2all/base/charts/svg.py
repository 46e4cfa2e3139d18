"""Charts as SVG: no script, nothing loaded from elsewhere.

Files have a white background. With ``inline``, for an HTML page, colours follow the text around the chart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from rich.cells import cell_len

from zero2all.base.charts.plot import Axis, Plot, colour
from zero2all.base.units import show_bytes, show_number

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 60, 60  # of the area around the curves
LINE = 18  # of a legend
GRID, AXIS = "#8883", "#888"
CHARACTER = 7  # width in pixels, about


def _svg(width: float, height: float, title: str, parts: Iterable[str], *, inline: bool) -> str:
    paper = "" if inline else f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>'
    ink = "" if inline else 'color="#222" '
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" style="max-width:100%;height:auto" role="img" fill="currentColor" '
        f'{ink}font-family="system-ui, Noto Sans CJK SC, sans-serif" font-size="12">'
        f"{paper}{_text(20, 26, title, size=15) if title else ''}{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>'


def _legend(names: Iterable[tuple[str, int]], x: float, y: float) -> Iterator[str]:
    for row, (name, number) in enumerate(names):
        yield _box(x, y + LINE * row - 8, 14, 8, colour(number))
        yield _text(x + 22, y + LINE * row, name)


def line_svg(plot: Plot, *, inline: bool = False) -> str:
    legend = [(curve.label, curve.colour) for curve in plot.curves if curve.label] if len(plot.curves) > 1 else []
    x_axis, y_axis = plot.axes(margin=0.06)
    base = HEIGHT - BOTTOM

    def x(value: float) -> float:
        return LEFT + 12 + x_axis.share(value) * (WIDTH - LEFT - RIGHT - 24)

    def y(value: float) -> float:
        return base - y_axis.share(value) * (base - TOP)

    def draw() -> Iterator[str]:
        yield _text(LEFT - 50, TOP - 14, f"{plot.y_label}{' (log scale)' if plot.log_y else ''}")
        for value in y_axis.ticks():
            yield f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>'
            yield _text(LEFT - 8, y(value) + 4, show_number(value), "end")
        for value, name in plot.x_ticks():
            yield _text(x(value), base + 20, name, "middle")
        yield f'<path d="M{LEFT} {base}H{WIDTH - RIGHT}" stroke="{AXIS}"/>'
        yield _text((LEFT + WIDTH - RIGHT) / 2, base + 40, plot.x_label + " (log scale)" * plot.log_x, "middle")
        for curve in plot.curves:
            path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in curve.line)
            yield f'<polyline points="{path}" fill="none" stroke="{colour(curve.colour)}" stroke-width="1.6"/>'
            for at, value in curve.points:
                title = f"{curve.label} {show_number(at)}: {show_number(value)}".strip()
                yield (
                    f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour(curve.colour)}" '
                    f'fill-opacity="0.6"><title>{escape(title)}</title></circle>'
                )
        yield from _legend(legend, LEFT, HEIGHT)

    return _svg(WIDTH, HEIGHT + LINE * len(legend), plot.title, draw(), inline=inline)


@dataclass(frozen=True)
class Bar:
    label: str
    """Bars in a row with the same one are a group."""
    value: float
    text: str
    """Label behind the bar."""
    colour: int = 0
    note: str = ""
    """Text that is shown when the pointer is over the bar."""


def bar_svg(
    title: str, bars: Sequence[Bar], series: Sequence[str] = (), limit: float | None = None, *, inline: bool = False
) -> str:
    """Horizontal bars. ``series`` names their colours; ``limit`` is a dashed line at this value."""
    left = 30 + CHARACTER * max(cell_len(bar.label) for bar in bars)
    right = 10 + CHARACTER * max(cell_len(bar.text) for bar in bars)
    axis = Axis(0, max(limit or 0, *(bar.value for bar in bars)) or 1)
    length = max(WIDTH - left - right, 200)
    starts = [True, *(one.label != other.label for one, other in pairwise(bars))]
    rows = [44 + 20 * row + 8 * sum(starts[1 : row + 1]) * bool(series) for row in range(len(bars))]
    end = rows[-1] + 20

    def draw() -> Iterator[str]:
        for bar, y, is_first in zip(bars, rows, starts, strict=True):
            width = length * axis.share(bar.value)
            if is_first:
                yield _text(left - 8, y + 12, bar.label, "end")
            yield _box(left, y, width, 16, colour(bar.colour), f"{bar.label}: {bar.text} {bar.note}".strip())
            yield _text(left + width + 6, y + 12, bar.text)
        if limit is not None:
            at = left + length * axis.share(limit)
            yield f'<path d="M{at:.1f} 38V{end}" stroke="{colour(3)}" stroke-dasharray="4"/>'
        yield from _legend(zip(series, range(len(series)), strict=True), left, end + 20)

    return _svg(left + length + right, end + 12 + LINE * len(series), title, draw(), inline=inline)


@dataclass(frozen=True)
class GanttSpan:
    """Something that takes time in a row of a Gantt chart."""

    row: int
    start: float
    end: float
    fill: str
    title: str


def gantt_svg(title: str, rows: Sequence[str], spans: Sequence[GanttSpan]) -> str:
    left = 30 + CHARACTER * max(map(cell_len, rows))
    axis, length = Axis(0, max(span.end for span in spans)), 900 - left

    def draw() -> Iterator[str]:
        for row, name in enumerate(rows):
            yield _text(20, 58 + 24 * row, name)
        for span in spans:
            x, end = (left + length * axis.share(at) for at in (span.start, span.end))
            yield _box(x, 44 + 24 * span.row, max(end - x - 0.5, 0.2), 20, span.fill, span.title)

    return _svg(left + length + 20, 60 + 24 * len(rows), title, draw(), inline=False)


Link = tuple[str, str, int]
"""Source, target, and how much flows."""


def sankey_svg(links: Sequence[Link], show: Callable[[int], str] = show_bytes, height: int = 460) -> str:
    """Sources on the left, outcomes on the right, bands as wide as what flows."""
    x0, x1, width, thick_all = 150, 670, 1000, height - 60
    scale = thick_all / (sum(size for _, _, size in links) or 1)
    left, right = _stack(links, 0), _stack(links, 1)
    tops = [_tops(side, scale) for side in (left, right)]
    used = [dict(side) for side in tops]

    def draw() -> Iterator[str]:
        sources, outcomes = list(left), list(right)
        for source, outcome, size in sorted(links, key=lambda one: (sources.index(one[0]), outcomes.index(one[1]))):
            thick, y0, y1, middle = size * scale, used[0][source], used[1][outcome], (x0 + x1) / 2
            used[0][source] += thick
            used[1][outcome] += thick
            path = (
                f"M{x0},{y0:.1f} C{middle},{y0:.1f} {middle},{y1:.1f} {x1},{y1:.1f} v{thick:.1f} "
                f"C{middle},{y1 + thick:.1f} {middle},{y0 + thick:.1f} {x0},{y0 + thick:.1f} Z"
            )
            fill, title = colour(sources.index(source)), escape(f"{source} → {outcome}: {show(size)}")
            yield f'<path d="{path}" fill="{fill}" opacity=".55"><title>{title}</title></path>'
        for name, size in left.items():
            yield _text(x0 - 8, tops[0][name] + size * scale / 2 + 4, f"{name} {show(size)}", "end", 13)
        for name, y in middles.items():
            yield _text(x1 + 8, y + 4, f"{name} {show(right[name])}", size=13)

    middles: dict[str, float] = {}
    lowest = 0.0
    for name, size in right.items():  # thin bands lie closer than their labels are high: these are pushed down
        middles[name] = lowest = max(tops[1][name] + size * scale / 2, lowest + LINE)
    return _svg(width, max(height, lowest + LINE), "", draw(), inline=True)


def _stack(links: Sequence[Link], side: int) -> dict[str, int]:
    """Size of each name on one side, largest first."""
    sizes: dict[str, int] = {}
    for link in links:
        name = str(link[side])
        sizes[name] = sizes.get(name, 0) + link[2]
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _tops(sizes: dict[str, int], scale: float) -> dict[str, float]:
    """Where the band of each name starts, with gaps between them."""
    gap = 60 / max(1, len(sizes))
    at, tops = gap / 2, {}
    for name, size in sizes.items():
        tops[name] = at
        at += size * scale + gap
    return tops
