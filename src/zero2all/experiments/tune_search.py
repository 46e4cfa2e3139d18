"""The search of ``z2a plan --try``: each axis alone, then what a model of them predicts, then rounds of the best.

It knows nothing of recipes: a point is a choice on each axis, and ``measure`` gives its seconds, or None if it failed.
The calls depend only on what earlier ones returned, so a search is resumed by answering them from a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Point = tuple[int, ...]
Measure = Callable[[Point, bool], float | None]
"""Seconds of a step at a point. The flag says whether the trial is one of the final rounds."""
FINALISTS = 4  # and the recipe as it is
GRID_SHARE = 3  # fewer than one of this many points is tried, unless the axes have more choices than that
MOST_POINTS = 40  # that are tried in a large grid, likewise
BATCH = 3  # predicted points that are tried before the prediction is made again
CANDIDATE_MARGIN = (
    1.2  # times the best: what is predicted or measured to be slower is not tried again; the rest is noise
)
RIDGE = 0.1  # of the fit: a single trial says a little less than many


@dataclass(frozen=True)
class Finalist:
    point: Point
    seconds: float
    """Median over the rounds."""
    relative: float
    """Median over the rounds of its seconds to the mean of the round: a machine that gets slower changes it little."""


@dataclass
class _Search:
    points: Mapping[Point, object]
    measure: Measure
    seconds: dict[Point, float] = field(default_factory=dict)
    """The time of the last trial of each point."""
    scores: dict[Point, float] = field(default_factory=dict)
    """Relative to the first point; infinite if it failed. A point is compared with one measured just before."""

    def try_point(self, point: Point, *, is_final: bool = False) -> float | None:
        seconds = self.measure(point, is_final)
        if seconds is not None:
            self.seconds[point] = seconds
        return seconds

    def start(self, point: Point) -> bool:
        """Try a first point. Returns whether it ran."""
        ran = self.try_point(point) is not None
        self.scores[point] = 1.0 if ran else math.inf
        return ran

    def line(self, point: Point, axis: int) -> list[Point]:
        """Points that differ from this one on one axis, and were not tried."""
        size = 1 + max(other[axis] for other in self.points)
        others = [(*point[:axis], choice, *point[axis + 1 :]) for choice in range(size)]
        return [other for other in others if other in self.points and other not in self.scores]

    def promising(self, best: Point) -> list[Point]:
        """Points that were not tried and are fast by a model without interactions: every choice has a factor."""
        tried = [point for point, score in self.scores.items() if score < math.inf]
        others = [point for point in self.points if point not in self.scores]
        if not others:
            return []
        rows = _one_hot([*tried, *others])
        known, unknown = rows[: len(tried)], rows[len(tried) :]
        logs = np.log([self.scores[point] for point in tried])
        factors = np.linalg.solve(known.T @ known + RIDGE * np.eye(rows.shape[1]), known.T @ logs)
        predicted = unknown @ factors
        limit = math.log(self.scores[best] * CANDIDATE_MARGIN)
        return [others[index] for index in np.argsort(predicted, kind="stable")[:BATCH] if predicted[index] < limit]

    def scan(self, best: Point, line: Sequence[Point]) -> Point:
        """Try a line of points, with the best one again for comparison. Returns the best one then."""
        self.try_point(best)
        unit = self.seconds[best] / self.scores[best]
        for point in line:
            seconds = self.try_point(point)
            self.scores[point] = math.inf if seconds is None else seconds / unit
        return min(self.scores, key=self.scores.__getitem__)


def _one_hot(points: Sequence[Point]) -> FloatArray:
    """A row for each point: 1, and then a column for each choice of each axis."""
    columns = [np.ones((len(points), 1))]
    for choices in np.array(points).T:
        columns.append(np.eye(1 + int(choices.max()))[choices])
    return np.hstack(columns)


def find_fastest(
    points: Mapping[Point, object], starts: Sequence[Point], measure: Measure, rounds: int
) -> list[Finalist]:
    """Finalists, fastest first; none if no start can be measured.

    ``starts`` are tried in turn until one can be measured; the last one is the recipe as it is. Then every axis is
    scanned from the best point so far, then points are tried that should be fast by what is known of their choices.
    """
    search = _Search(points, measure)
    best = next((start for start in dict.fromkeys(starts) if search.start(start)), None)
    if best is None:
        return []
    for axis in range(len(best)):
        if line := search.line(best, axis):
            best = search.scan(best, line)
    limit = min((len(points) - 1) // GRID_SHARE, MOST_POINTS)
    while batch := search.promising(best)[: max(0, limit - len(search.scores))]:
        best = search.scan(best, batch)
    ranked = sorted(search.scores, key=search.scores.__getitem__)[:FINALISTS]
    close = [point for point in ranked if search.scores[point] < CANDIDATE_MARGIN * search.scores[best]]
    own = [starts[-1]] if search.scores.get(starts[-1]) != math.inf else []
    finalists = list(dict.fromkeys([*close, *own]))
    return _final_rounds(search, finalists, rounds)


def _final_rounds(search: _Search, finalists: list[Point], rounds: int) -> list[Finalist]:
    """Every finalist once in each round, every other round backwards; one that fails is out."""
    measured: dict[Point, list[float]] = {point: [] for point in finalists}
    for number in range(rounds):
        for point in list(measured)[:: -1 if number % 2 else 1]:
            seconds = search.try_point(point, is_final=True)
            if seconds is None:
                del measured[point]
            else:
                measured[point].append(seconds)
    means = [fmean(times) for times in zip(*measured.values(), strict=True)]
    found = [
        Finalist(point, median(times), median(time / mean for time, mean in zip(times, means, strict=True)))
        for point, times in measured.items()
    ]
    return sorted(found, key=lambda one: one.relative)
