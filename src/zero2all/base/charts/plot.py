"""What a chart shows, whatever draws it: curves, axes with their ticks, and the palette."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from zero2all.base.units import show_number

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a16207", "#64748b", "#84cc16")
"""The colours of curves and bars, in this order; the live page has the same."""
MAX_CURVES, MAX_POINTS = 200, 5000
MIN_TICK_GAP = 0.1  # of the axis, between values that are ticks themselves

Finite = Annotated[float, Field(allow_inf_nan=False)]
Points = Annotated[list[tuple[Finite, Finite]], Field(max_length=MAX_POINTS)]


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def tint(number: int, share: float = 0.25) -> str:
    """A colour of the palette mixed with white, as a background.

    >>> tint(0)
    '#cee0fd'
    """
    channels = bytes.fromhex(colour(number)[1:])
    return "#" + bytes(round(share * channel + (1 - share) * 255) for channel in channels).hex()


@dataclass(frozen=True)
class Axis:
    """A scale that maps values to places between 0 and 1."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, values: Collection[float], *, log: bool = False, margin: float = 0.0) -> Axis:
        """An axis from the lowest to the highest value. ``margin`` adds a share of their distance at both ends."""
        scaled = [math.log(value) for value in values] if log else values
        low, high = min(scaled), max(scaled)
        more = margin * (high - low or 0.2)
        low, high = low - more, high + more
        return cls(math.exp(low), math.exp(high), log) if log else cls(low, high)

    def share(self, value: float) -> float:
        low, high, at = map(math.log if self.log else float, (self.low, self.high, value))
        return (at - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else round_ticks(self.low, self.high)


@dataclass(frozen=True)
class Curve:
    label: str
    line: Points
    points: Points = field(default_factory=list)
    """Single measurements, where the line is their mean."""
    colour: int = 0
    """Curves of one group have the same."""


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    curves: Annotated[list[Curve], Field(max_length=MAX_CURVES)]
    log_x: bool = False
    categories: list[str] = field(default_factory=list)
    """Names of x = 0, 1, 2, ... where the values are not numbers."""
    log_y: bool = False

    def axes(self, margin: float = 0.0) -> tuple[Axis, Axis]:
        """The axis of x, and the axis of y with a margin."""
        xs, ys = zip(*(place for curve in self.curves for place in (*curve.line, *curve.points)), strict=True)
        return Axis.over(xs, log=self.log_x), Axis.over(ys, log=self.log_y, margin=margin)

    def x_ticks(self) -> list[tuple[float, str]]:
        if self.categories:
            return [(float(number), name) for number, name in enumerate(self.categories)]
        values = sorted({x for curve in self.curves for x, _ in (*curve.line, *curve.points)})
        axis, _ = self.axes()
        has_room = all(axis.share(right) - axis.share(left) >= MIN_TICK_GAP for left, right in pairwise(values))
        return [(x, show_number(x)) for x in (values if has_room else axis.ticks())]


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


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two values, and where these are few, 2 and 5 times a power too.

    >>> log_ticks(3, 2000), log_ticks(3, 30)
    ([10.0, 100.0, 1000.0], [5.0, 10.0, 20.0])
    """
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        ticks = [at for power in powers for factor in factors if low <= (at := factor * 10.0**power) <= high]
        if len(ticks) > 2:
            return ticks
    return round_ticks(low, high)
