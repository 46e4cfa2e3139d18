"""The plot of a sweep: bits per byte over a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from zero2all.charts.plot import MAX_CURVES, Curve, Plot
from zero2all.track.experiment_record import ExperimentRecord
from zero2all.track.record_lines import is_number
from zero2all.units import show_number


def sweep_plot(record: ExperimentRecord) -> Plot | None:
    """Bits per byte over the values of the first key, with a curve for each combination of the others."""
    keys = set(record.keys)
    scored = ((one, one.bits_per_byte(record.target)) for one in record.variants if keys <= set(one.values))
    measured = [(one, value) for one, value in scored if value is not None]
    if not keys or not measured:
        return None
    key, *others = record.keys
    values = list(dict.fromkeys(variant.values[key] for variant, _ in measured))
    numbers = [float(value) for value in values if isinstance(value, int | float) and is_number(value)]
    are_numbers = len(numbers) == len(values) and all(map(math.isfinite, numbers))
    at = {value: float(value) if are_numbers else float(number) for number, value in enumerate(values)}
    curves: list[Curve] = []
    for rest in dict.fromkeys(tuple(variant.values[other] for other in others) for variant, _ in measured):
        points = sorted(
            (at[variant.values[key]], value)
            for variant, value in measured
            if tuple(variant.values[other] for other in others) == rest
        )
        line = [(x, fmean(value for place, value in points if place == x)) for x in sorted({x for x, _ in points})]
        label = ", ".join(f"{other.rpartition('.')[2]} {show_value(v)}" for other, v in zip(others, rest, strict=True))
        curves.append(Curve(label, line, points, colour=len(curves)))
    categories = [] if are_numbers else [show_value(value) for value in values]
    title = f"{record.name}: validation bits per byte"
    return Plot(title, key, "bits per byte", curves[:MAX_CURVES], are_numbers and is_geometric(numbers), categories)


def is_geometric(values: Sequence[float]) -> bool:
    """Whether a log axis suits the values: their ratios are more even than their differences."""
    ordered = sorted(set(values))
    if len(ordered) < 2 or ordered[0] <= 0:
        return False
    if len(ordered) == 2:
        return ordered[1] / ordered[0] >= 4
    gaps, ratios = np.diff(ordered), np.diff(np.log(ordered))
    return bool(ratios.max() / ratios.min() < gaps.max() / gaps.min())


def show_value(value: object) -> str:
    """A number as short as possible; text as it is."""
    return show_number(value) if isinstance(value, float) else str(value)
