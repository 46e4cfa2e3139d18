"""Plots of an experiment: bits per byte over a value, or the curves of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from zero2all.experiments.comparison import Comparison
from zero2all.track.experiment_record import ExperimentRecord
from zero2all.track.record_lines import is_number
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

CURVE_POINTS = 200
MAX_CURVES = 24
LOSS = "loss"
VALIDATION = "validation/all"


@dataclass(frozen=True)
class Curve:
    label: str
    x: list[float]
    y: list[float]
    points: list[tuple[float, float]] = field(default_factory=list)
    """Single measurements, where the curve is their mean."""
    colour: int = 0
    """Curves of one group have the same."""


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    log_x: bool = False
    categories: list[str] = field(default_factory=list)
    """Names of x = 0, 1, 2, ... where the values are not numbers."""

    def x_position(self, x: float) -> float:
        return math.log(x) if self.log_x else x


def sweep_plot(record: ExperimentRecord) -> Plot | None:
    """Bits per byte over the values of the first key, with a curve for each combination of the others."""
    keys = set(record.keys)
    measured = [one for one in record.variants if one.bits_per_byte is not None and keys <= set(one.values)]
    if not keys or not measured:
        return None
    key, *others = record.keys
    values = list(dict.fromkeys(variant.values[key] for variant in measured))
    numbers = [float(value) for value in values if isinstance(value, int | float) and is_number(value)]
    are_numbers = len(numbers) == len(values) and all(map(math.isfinite, numbers))
    at = {value: float(value) if are_numbers else float(number) for number, value in enumerate(values)}
    curves: list[Curve] = []
    for rest in dict.fromkeys(tuple(variant.values[other] for other in others) for variant in measured):
        points = sorted(
            (at[variant.values[key]], variant.bits_per_byte)
            for variant in measured
            if variant.bits_per_byte is not None and tuple(variant.values[other] for other in others) == rest
        )
        x = sorted({place for place, _ in points})
        mean = [fmean(value for place, value in points if place == one) for one in x]
        label = ", ".join(f"{other.rpartition('.')[2]} {show_value(v)}" for other, v in zip(others, rest, strict=True))
        curves.append(Curve(label, x, mean, points, colour=len(curves)))
    categories = [] if are_numbers else [show_value(value) for value in values]
    title = f"{record.name}: validation bits per byte"
    return Plot(title, key, "bits per byte", curves, are_numbers and is_geometric(numbers), categories)


def curves_plot(comparison: Comparison) -> Plot | None:
    """Validation bits per byte of every run over its steps; the training loss where runs do not validate."""
    groups = list(dict.fromkeys(variant.group for variant in comparison.record.variants))
    begun = [variant for variant in comparison.record.variants if variant.name in comparison.directories][:MAX_CURVES]
    views = [RunView(LocalRunLocation(comparison.directories[variant.name])) for variant in begun]
    for view in views:
        view.read_to_end()
    has_validation = all(len(view.validation_table().steps) > 1 for view in views)
    curves = []
    for variant, view in zip(begun, views, strict=True):
        name = VALIDATION if has_validation else LOSS
        table = view.validation_table() if has_validation else view.table([LOSS], points=CURVE_POINTS)
        known = np.isfinite(table.mean[name])
        x, y = (table.steps[known] + 1).tolist(), table.mean[name][known].tolist()
        if x:
            curves.append(Curve(variant.name, x, y, colour=groups.index(variant.group)))
    if not curves:
        return None
    what = "validation bits per byte" if has_validation else "training loss"
    return Plot(f"{comparison.record.name}: {what}", "step", what, curves)


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
    return f"{value:g}" if isinstance(value, float) else str(value)
