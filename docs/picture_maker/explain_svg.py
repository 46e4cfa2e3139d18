"""What the pictures of docs/explain are drawn with: a canvas of text and boxes, readable on light and dark pages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from zero2all.base.charts.plot import Axis, Plot, colour
from zero2all.base.units import show_number

INK, PAPER, GRID, AXIS = "#222", "#fff", "#8885", "#888"
STYLE = (
    f'<style>svg{{color:{INK}}}@media(prefers-color-scheme:dark){{svg{{color:#e5e7eb}}rect[fill="{PAPER}"]'
    "{fill:#111827}}</style>"
)
FONTS = "system-ui, Noto Sans CJK SC, sans-serif"


CHINESE = tomllib.loads(Path(__file__).with_name("explain_zh.toml").read_text(encoding="utf-8"))


class Words:
    """The texts of a picture in one language: ``words("{n} ranks", n=2)``."""

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, english: str, **values: object) -> str:
        text = english if self.language == "en" else str(CHINESE[english])
        return text.format(**values) if values else text


class Canvas:
    """A picture in the making."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []
        self.text(20, 28, title, size=16, bold=True)

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: float = 13, *, bold: bool = False,
        fill: str = "",
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        paint = f' fill="{fill}"' if fill else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}{paint}>'
            f"{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", *, line: str = "", title: str = "",
        radius: float = 0,
    ) -> None:  # fmt: skip
        inside = f"<title>{escape(title)}</title>" if title else ""
        edge = f' stroke="{line}"' if line else ""
        corner = f' rx="{radius}"' if radius else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{edge}{corner}>'
            f"{inside}</rect>"
        )

    def path(self, points: Sequence[tuple[float, float]], line: str, width: float = 1.6, dash: str = "") -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{line}" stroke-width="{width}"{dashed}/>')

    def arrow(self, x: float, y: float, end: float) -> None:
        self.path([(x, y), (end - 2, y)], AXIS)
        self.path([(end - 8, y - 4), (end - 2, y), (end - 8, y + 4)], AXIS)

    def legend(self, x: float, y: float, names: Sequence[tuple[str, str]], gap: float = 24) -> None:
        """Names with their colours, in a row."""
        for name, fill in names:
            self.box(x, y - 9, 13, 10, fill)
            self.text(x + 18, y, name)
            x += 18 + gap + sum(13 if ord(letter) > 0x2E80 else 6.6 for letter in name)

    def panel(self, plot: Plot, x: float, y: float, width: float, height: float, mark: float | None = None) -> None:
        """A small line chart: for one chart in a picture, take ``line_svg``."""
        left, bottom = 34, 20
        x_axis, y_axis = plot.axes(margin=0.05)
        y_axis = Axis(0.0, y_axis.high)

        def place(at: tuple[float, float]) -> tuple[float, float]:
            high = min(1.0, y_axis.share(at[1]))
            return x + left + x_axis.share(at[0]) * (width - left), y + (1 - high) * (height - bottom)

        for value in y_axis.ticks():
            at = place((x_axis.low, value))[1]
            self.path([(x + left, at), (x + width, at)], GRID, 1)
            self.text(x + left - 6, at + 4, show_number(value), "end", 11)
        for value in x_axis.ticks():
            self.text(place((value, 0))[0], y + height - 4, show_number(value), "middle", 11)
        if mark is not None:
            at = place((mark, 0))[0]
            self.path([(at, y), (at, y + height - bottom)], AXIS, 1, "3")
        for curve in plot.curves:
            self.path([place(point) for point in curve.line], colour(curve.colour), 1.4)

    def svg(self) -> str:
        return themed(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" fill="currentColor" font-family="{FONTS}">'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>{"".join(self._parts)}</svg>\n'
        )


def themed(svg: str) -> str:
    """A chart with the colours of the reader's scheme: ``zero2all.base.charts`` writes those of a light page."""
    return re.sub(r"(<svg[^>]*>)", lambda head: head[1] + STYLE, svg, count=1)
