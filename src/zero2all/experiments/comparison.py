"""What is compared: the runs of an experiment, or runs that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.base.charts.plot import Curve, Plot
from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.records import parse_record
from zero2all.experiments.evaluate import (
    CheckpointEvaluation,
    evaluate,
    newest_step,
    run_result,
    saved_evaluation,
    to_evaluation,
)
from zero2all.experiments.summary import summarize
from zero2all.experiments.target import require_validation
from zero2all.experiments.variants import recipe_values, result_key
from zero2all.track.eval_record import LossEvaluation
from zero2all.track.experiment_record import (
    BITS_PER_BYTE,
    EXPERIMENT_FILE,
    FORMAT,
    ExperimentRecord,
    VariantRecord,
    VariantResult,
    VariantState,
    read_experiment,
)
from zero2all.track.run_locations import LocalRunLocation, find_runs
from zero2all.track.run_view import RunView, read_run_view
from zero2all.train import Run

CURVE_POINTS = 200
MAX_SHOWN_CURVES = 24
LOSS = "loss"
VALIDATION = "validation/all"


@dataclass(frozen=True)
class Comparison:
    """The record of an experiment, or one made of runs that exist, and where its runs are."""

    record: ExperimentRecord
    directories: dict[str, Path]
    """The directories of the runs that were begun, by variant."""

    def differences(self) -> dict[str, dict[str, Any]]:
        """Recipe keys whose values differ between groups: the value of each group, by key."""
        recipes: dict[str, dict[str, Any]] = {}
        for variant in self.record.variants:
            if variant.group not in recipes and variant.name in self.directories:
                recipe = Run.open(self.directories[variant.name]).recipe
                recipes[variant.group] = recipe_values(recipe.model_dump(mode="json"))
        keys = dict.fromkeys(key for values in recipes.values() for key in values)
        by_key = {key: {group: values.get(key) for group, values in recipes.items()} for key in keys if key != "seed"}
        return {key: values for key, values in by_key.items() if len({repr(value) for value in values.values()}) > 1}


def curves_plot(comparison: Comparison) -> Plot | None:
    """Validation bits per byte of every run over its steps; the training loss where runs do not validate."""
    groups = list(dict.fromkeys(variant.group for variant in comparison.record.variants))
    begun = [variant for variant in comparison.record.variants if variant.name in comparison.directories][
        :MAX_SHOWN_CURVES
    ]
    views = [read_run_view(comparison.directories[variant.name]) for variant in begun]
    has_validation = all(len(view.validation_table().steps) > 1 for view in views)
    curves = []
    for variant, view in zip(begun, views, strict=True):
        name = VALIDATION if has_validation else LOSS
        table = view.validation_table() if has_validation else view.table([LOSS], points=CURVE_POINTS)
        known = np.isfinite(table.mean[name])
        line = list(zip((table.steps[known] + 1).tolist(), table.mean[name][known].tolist(), strict=True))
        if line:
            curves.append(Curve(variant.name, line, colour=groups.index(variant.group)))
    if not curves:
        return None
    what = "validation bits per byte" if has_validation else "training loss"
    return Plot(f"{comparison.record.name}: {what}", "step", what, curves)


def compare_targets(targets: Sequence[Path], target: Mapping[str, float] | None = None) -> Comparison:
    """An experiment's directory, or runs: run directories, or directories with runs below them.

    ``target`` replaces an experiment's own.
    """
    experiments = [target for target in targets if (target / EXPERIMENT_FILE).is_file()]
    if len(targets) == 1 and experiments:
        return open_experiment(targets[0], target)
    if experiments:
        raise UsageError(f"{experiments[0]} is an experiment: give it alone, or directories of its runs")
    locations = find_runs(list(map(str, targets)))
    local = {location.directory: location for location in locations if isinstance(location, LocalRunLocation)}
    return compare_runs(list(local.values()), target)


def open_experiment(directory: Path, target: Mapping[str, float] | None = None) -> Comparison:
    record = _with_target(read_experiment(directory / EXPERIMENT_FILE), target)
    directories = {variant.name: directory / variant.name for variant in record.variants}
    begun = {name: path for name, path in directories.items() if (path / "identity.json").exists()}
    return Comparison(summarize(record), begun)


def _with_target(record: ExperimentRecord, target: Mapping[str, float] | None) -> ExperimentRecord:
    if not target:
        return record
    prefix = f"{BITS_PER_BYTE}/"
    metrics = {name for variant in record.variants if variant.result for name in variant.result.metrics}
    require_validation(target, {name.removeprefix(prefix) for name in metrics if name.startswith(prefix)})
    return replace(record, target=dict(target))


def compare_runs(locations: Sequence[LocalRunLocation], target: Mapping[str, float] | None = None) -> Comparison:
    """Runs that differ only in their seed are one group, named after the first of them."""
    groups: dict[str, str] = {}
    variants, directories = [], {}
    for location in locations:
        run = Run.open(location.directory)
        directories[location.name] = run.directory
        group = groups.setdefault(result_key(run.recipe, with_seed=False), location.name)
        variants.append(_describe_run(run, location.name, group))
    record = ExperimentRecord(FORMAT, "runs", "runs", [], None, variants=variants)
    return Comparison(summarize(_with_target(record, target)), directories)


def _describe_run(run: Run, name: str, group: str) -> VariantRecord:
    view = read_run_view(run.directory)
    result: VariantResult | None = None
    reason = ""
    try:
        result = run_result(run, _find_evaluation(run, view))
    except Z2aError as error:
        reason = str(error)
    state: VariantState = "done" if view.ended == "done" else "stopped" if view.ended else "running"
    key = result_key(run.recipe)
    return VariantRecord(name, group, run.recipe.seed, str(run.directory), [], {}, key, None, state, reason, result)


def _find_evaluation(run: Run, view: RunView) -> CheckpointEvaluation:
    """The evaluation of the newest checkpoint: saved, recorded by the run itself, or made now."""
    if (saved := saved_evaluation(run)) is not None:
        return saved
    step = newest_step(run)
    recorded = [event for event in view.events if event.event == "evaluation" and event.step is not None]
    latest = next((event for event in reversed(recorded) if (event.step or 0) + 1 == step), None)
    if latest is not None and step is not None and {BITS_PER_BYTE, "bytes", "sources"} <= set(latest.details):
        return to_evaluation(run, step, parse_record(LossEvaluation, latest.details, run.record_path))
    say(f"evaluating {run.directory}")
    return evaluate(run)
