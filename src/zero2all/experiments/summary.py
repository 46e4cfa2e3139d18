"""The summary of an experiment: means of its groups, verdicts between them, and a plot."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from zero2all.experiments.ladder import ladder_plot
from zero2all.experiments.mixtures import analyze_mixtures
from zero2all.experiments.plots import sweep_plot
from zero2all.experiments.statistics import compare_groups, standard_deviation
from zero2all.track.experiment_record import LADDER, MIXTURE_SEARCH, ExperimentRecord, GroupSummary, Verdict


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
        # That of all validation text: the best of a target during training is not known.
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
