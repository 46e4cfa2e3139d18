"""How the loss of each source changes, in units of its own noise: a batch of few rows says little about the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero2all.track.record_reader import Array, MetricTable
from zero2all.track.run_view import RunView

SMOOTH = 12  # points of a source whose median is compared, at least
TREND = 30  # points that a trend is taken from
CHANGE_ERRORS = 3.0  # standard errors that are no longer noise
CERTAIN_ERRORS = 6.0  # by which all sources together must have changed, each of them by a third
DROP_ERRORS = 10.0  # of a drop: a model may learn something at once
MAD_TO_STD = 1.4826  # median absolute deviation to the standard deviation of a normal distribution
MEDIAN_ERROR = 1.2533  # standard error of a median, relative to a mean


@dataclass(frozen=True)
class SourceCurve:
    """The loss of a source at the steps that have one."""

    name: str
    """Empty if the run has only one."""
    steps: Array
    loss: Array


@dataclass(frozen=True)
class LossChange:
    """The loss of a source before and now, and by how many standard errors it has changed."""

    source: str
    before: float
    now: float
    errors: float
    step: int

    @property
    def prefix(self) -> str:
        return f"{self.source}: " if self.source else ""

    @property
    def share(self) -> float:
        return abs(self.now - self.before) / self.before if self.before > 0 else 0.0

    def is_large(self, share: float) -> bool:
        return self.share > share and self.errors > CHANGE_ERRORS


def source_curves(run: RunView, table: MetricTable, points: int) -> list[SourceCurve]:
    """The curve of each source, or the loss in ``table`` if there are not several."""
    names = [name for name in run.readers[0].names if name.startswith("loss/")]
    columns = {"loss": table} if len(names) < 2 else dict.fromkeys(names, run.table(names, points=points))
    found = []
    for name, own in columns.items():
        valid = np.isfinite(own.mean[name])
        found.append(SourceCurve(name.partition("/")[2], own.steps[valid], own.mean[name][valid]))
    return found


def median_error(values: Array, inverse_count: float) -> float:
    """Standard error of a median. The noise comes from differences of neighbours, which a trend hardly changes."""
    noise = float(np.median(np.abs(np.diff(values)))) * MAD_TO_STD / math.sqrt(2) if len(values) > 1 else 0.0
    return max(1e-9, noise * MEDIAN_ERROR * math.sqrt(inverse_count))


def rise_since_best(source: SourceCurve) -> LossChange | None:
    """The latest median against the lowest so far."""
    width = max(SMOOTH, len(source.loss) // 20)
    if len(source.loss) < 3 * width:
        return None
    smooth = trailing_median(source.loss, width)[width - 1 :]
    best, now = int(np.argmin(smooth)), float(smooth[-1])
    errors = (now - float(smooth[best])) / median_error(source.loss, 2 / width)
    return LossChange(source.name, float(smooth[best]), now, errors, int(source.steps[best + width - 1]))


def is_certain(changes: list[LossChange]) -> bool:
    """Whether all of them change, and together by more than chance explains."""
    lowest = min(change.errors for change in changes)
    return (
        lowest > CERTAIN_ERRORS / 3
        and sum(change.errors for change in changes) / math.sqrt(len(changes)) > CERTAIN_ERRORS
    )


def fall_below_trend(source: SourceCurve, first_step: float) -> LossChange | None:
    """The largest fall of some points below the line through those before them, from ``first_step`` on."""
    values, count = source.loss, len(source.loss) - TREND - SMOOTH + 1
    if count < 1 or np.ptp(values[-SMOOTH:]) == 0:  # a dead source has a constant loss
        return None
    before = sliding_window_view(values, TREND)[:count]
    after = np.median(sliding_window_view(values, SMOOTH)[TREND:], axis=-1)
    places = np.arange(TREND) - (TREND - 1) / 2
    slope = (before * places).sum(axis=-1) / (places**2).sum()
    # A rising line is no trend to fall from: the loss is noisy, or diverges.
    expected = np.median(before, axis=-1) + np.minimum(slope, 0.0) * (TREND + SMOOTH) / 2
    noise = np.median(np.abs(np.diff(before, axis=-1)), axis=-1) * MAD_TO_STD / math.sqrt(2)
    errors = (expected - after) / np.maximum(1e-9, noise * MEDIAN_ERROR * math.sqrt(1 / SMOOTH + 1 / TREND))
    steps = source.steps[TREND : TREND + count]
    counts = (steps >= first_step) & (expected > 0)
    worst = int(np.argmax(np.where(counts, errors, 0.0)))
    if not counts[worst]:
        return None
    before_it, now, by = (float(column[worst]) for column in (expected, after, errors))
    return LossChange(source.name, before_it, now, by, int(steps[worst]))


def trailing_median(values: Array, width: int) -> Array:
    """The median of the last ``width`` points at every point."""
    padded = np.pad(values, (width - 1, 0), mode="edge")
    smoothed: Array = np.median(sliding_window_view(padded, width), axis=-1)
    return smoothed
