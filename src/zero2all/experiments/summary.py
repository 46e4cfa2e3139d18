"""The summary of an experiment: means of its groups, verdicts between them, and a plot of bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from zero2all.base.charts.plot import MAX_CURVES, Curve, Plot
from zero2all.base.units import show_number
from zero2all.experiments.ladder import ladder_plot
from zero2all.experiments.mixtures import analyze_mixtures
from zero2all.experiments.statistics import compare_groups, standard_deviation
from zero2all.track.experiment_record import LADDER, MIXTURE_SEARCH, ExperimentRecord, GroupSummary, Verdict
from zero2all.track.record_lines import is_number


def summarize(record: ExperimentRecord) -> ExperimentRecord:
    """The record with a summary of the results that its variants have now."""
    groups = [_summarize_group(record, group) for group in dict.fromkeys(variant.group for variant in record.variants)]
    if record.is_sweep:
        groups.sort(key=lambda one: (one.bits_per_byte is None, one.bits_per_byte or 0.0))
    plot = sweep_plot(record) if record.kind == "sweep" else None
    if record.kind == LADDER:
        plot = ladder_plot(record)
    fit = None
    if record.kind == MIXTURE_SEARCH and (analysis := analyze_mixtures(record)) is not None:
        fit, plot = analysis
    return replace(record, groups=groups, verdicts=_verdicts(record, groups), plot=plot, fit=fit)


def _summarize_group(record: ExperimentRecord, group: str) -> GroupSummary:
    members = [variant for variant in record.variants if variant.group == group]
    measured = [(one, one.result, one.bits_per_byte(record.target)) for one in members]
    known = [(one, result, value) for one, result, value in measured if result is not None and value is not None]
    problems = [
        f"seed {one.seed}: {one.state}{f', {one.reason}' if one.reason else ''}"
        for one, _, value in measured
        if value is None
    ]
    seeds = [one.seed for one, _, _ in known]
    if not known:
        return GroupSummary(group, len(members), seeds, problems)
    values, results = [value for _, _, value in known], [result for _, result, _ in known]
    return GroupSummary(
        group=group,
        runs=len(members),
        seeds=seeds,
        problems=problems,
        bits_per_byte=fmean(values),
        spread=standard_deviation(values),
        # Measured on all validation text: the best of a target during training is not known.
        best_bits_per_byte=None if record.target else fmean(result.best_bits_per_byte for result in results),
        steps=max(result.steps for result in results),
        tokens=max(result.tokens for result in results),
        tokens_per_second=fmean(result.tokens_per_second for result in results),
        seconds=fmean(result.seconds for result in results),
    )


def _verdicts(record: ExperimentRecord, groups: list[GroupSummary]) -> list[Verdict]:
    """Each other group against the first one, which is the best one in a sweep.

    Groups that were measured on other validation text are left out.
    """
    if record.kind == LADDER:  # sizes are not compared
        return []
    values = record.values_by_group()
    sets = {variant.group: variant.result.validation_set for variant in record.variants if variant.result is not None}
    known = [one.group for one in groups if one.group in values]
    return [compare_groups(known[0], other, values) for other in known[1:] if sets[other] == sets[known[0]]]


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
