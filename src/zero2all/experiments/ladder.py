"""``z2a compare``: train a family of small models, fit the loss against compute, and predict the next size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.base.charts.plot import Curve, Plot
from zero2all.base.charts.table import UNKNOWN, text_table
from zero2all.base.errors import UsageError
from zero2all.base.units import show_count
from zero2all.experiments.scaling_law import (
    MAX_EXTRAPOLATION,
    MIN_POINTS,
    MIN_SIZES,
    Point,
    Prediction,
    ScalingFit,
    fit_power_law,
)
from zero2all.experiments.variants import ExperimentPlan, VariantGroup, make_plan
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import Recipe, load_recipe, load_recipe_or_preset
from zero2all.track.experiment_record import LADDER, LADDER_COMPUTE, LADDER_PARAMETERS, LADDER_TARGET, ExperimentRecord

WIDTH_KEY = "model.hidden_size"
INTERMEDIATE_MULTIPLE = 16
BAND_POINTS = 24  # of each line in the plot


@dataclass(frozen=True)
class LadderReport:
    """What the ladder says."""

    experiment: ExperimentRecord
    fit: str
    """The law."""
    prediction: Prediction | None
    measured: float | None
    """Bits per byte of the predicted size, if it was trained."""


def size_overrides(recipe: Recipe, width: int) -> list[str]:
    """The recipe's model at another width: same head size and ratios of depth, feed-forward and KV heads."""
    model = recipe.model
    if width % model.head_size:
        raise UsageError(
            f"width {width} is not a multiple of the head size {model.head_size}: use multiples, such as "
            f"{max(1, round(width / model.head_size)) * model.head_size}"
        )
    heads = width // model.head_size
    groups = model.num_attention_heads // model.num_key_value_heads
    ratio = width / model.hidden_size
    intermediate = INTERMEDIATE_MULTIPLE * max(1, round(model.intermediate_size * ratio / INTERMEDIATE_MULTIPLE))
    return [
        f"{WIDTH_KEY}={width}",
        f"model.num_attention_heads={heads}",
        f"model.num_key_value_heads={heads // groups if heads % groups == 0 else heads}",
        f"model.num_hidden_layers={max(1, round(model.num_hidden_layers * ratio))}",
        f"model.intermediate_size={intermediate}",
    ]


def plan_ladder(
    path: Path,
    words: Sequence[str],
    widths: Sequence[int],
    seeds: int,
    tokens_per_parameter: float,
    target: int | None = None,
    name: str | None = None,
) -> ExperimentPlan:
    """One group for each width, trained for a multiple of its parameters. ``target`` is trained too, but not fitted."""
    base = load_recipe(path, list(words))
    if base.model.moe is not None:
        raise UsageError("a ladder is for dense models: the width of experts does not follow the model's width")
    if base.train.stages:
        raise UsageError("the recipe has stages: a ladder sets the length of each size, so remove train.stages")
    if len(widths) < MIN_SIZES or len(widths) * seeds < MIN_POINTS:
        raise UsageError(f"a scaling law needs at least {MIN_SIZES} sizes and {MIN_POINTS} runs: add widths or seeds")
    if len(set(widths)) < len(widths) or target in widths:
        raise UsageError("a width is given twice")
    groups = []
    for width in [*widths, *([] if target is None else [target])]:
        sized = size_recipe(path, words, width, tokens_per_parameter)
        values: dict[str, int | float | str] = {
            WIDTH_KEY: width,
            LADDER_PARAMETERS: sized.parameters,
            LADDER_COMPUTE: sized.compute,
            LADDER_TARGET: int(width == target),
        }
        recipe = load_recipe(path, sized.overrides)
        groups.append(VariantGroup(f"width {width}", path, sized.overrides, recipe, values))
    return make_plan(name or "ladder", LADDER, [WIDTH_KEY], groups, seeds)


@dataclass(frozen=True)
class SizedRecipe:
    overrides: list[str]
    parameters: int
    tokens: int
    compute: float


def size_recipe(path: Path, words: Sequence[str], width: int, tokens_per_parameter: float) -> SizedRecipe:
    """The overrides of one width. Compute is what the model needs, without recomputation."""
    overrides = [*words, *size_overrides(load_recipe(path, list(words)), width)]
    recipe = load_recipe_or_preset(str(path), overrides)
    parameters = count_parameters(recipe.model).total
    tokens = max(recipe.train.seq_len, round(tokens_per_parameter * parameters))
    compute = float(flops_per_token(recipe.model, recipe.train.seq_len).model) * tokens
    return SizedRecipe([*overrides, f"train.tokens={tokens}"], parameters, tokens, compute)


def check_reach(predicted: SizedRecipe, trained: Sequence[SizedRecipe]) -> None:
    largest = max(size.compute for size in trained)
    if predicted.compute > MAX_EXTRAPOLATION * largest:
        raise UsageError(
            f"the predicted size needs {predicted.compute / largest:.0f} times the compute of the largest one of "
            f"--widths, and a fit says nothing beyond {MAX_EXTRAPOLATION:.0f} times: add a larger width"
        )


def ladder_points(record: ExperimentRecord) -> list[Point]:
    """Points of the runs that the law is fitted to."""
    return [
        Point(float(one.values[LADDER_COMPUTE]), value)
        for one in record.variants
        if not one.values.get(LADDER_TARGET) and (value := one.bits_per_byte(record.target)) is not None
    ]


def fit_ladder(record: ExperimentRecord) -> ScalingFit:
    return fit_power_law(ladder_points(record))


def ladder_report(record: ExperimentRecord, predicted: SizedRecipe | None) -> LadderReport:
    fit = fit_ladder(record)
    law = fit.law
    formula = f"{law.floor:.4f} + {law.scale:.4g} x C^-{law.exponent:.4f}, noise {fit.noise:.4f} bits per byte"
    measured = [
        value
        for one in record.variants
        if one.values.get(LADDER_TARGET) and (value := one.bits_per_byte(record.target)) is not None
    ]
    prediction = None if predicted is None else fit.predict(predicted.compute)
    return LadderReport(record, formula, prediction, float(np.mean(measured)) if measured else None)


def ladder_text(report: LadderReport) -> str:
    rows = [["size", "parameters", "tokens", "FLOPs", "bits per byte", "fit"]]
    fit = fit_ladder(report.experiment)
    for group in report.experiment.groups:
        variant = next(one for one in report.experiment.variants if one.group == group.group)
        compute = float(variant.values[LADDER_COMPUTE])
        value = UNKNOWN if group.bits_per_byte is None else f"{group.bits_per_byte:.4f}"
        note = " (not in the fit)" if variant.values.get(LADDER_TARGET) else ""
        rows.append(
            [
                group.group + note,
                show_count(float(variant.values[LADDER_PARAMETERS])),
                UNKNOWN if group.tokens is None else show_count(group.tokens),
                f"{compute:.3g}",
                value,
                f"{fit.law(compute):.4f}",
            ]
        )
    lines = [text_table(rows), "", f"bits per byte = {report.fit}"]
    if (found := report.prediction) is not None:
        lines.append(
            f"predicted at {found.compute:.3g} FLOPs: {found.loss:.4f} bits per byte, 95% interval "
            f"{found.low:.4f} to {found.high:.4f} (± {100 * found.margin:.1f}%)"
        )
        if report.measured is not None:
            error = report.measured / found.loss - 1
            inside = "inside" if found.low <= report.measured <= found.high else "OUTSIDE"
            lines.append(f"measured: {report.measured:.4f}, {100 * error:+.2f}%, {inside} the interval")
    return "\n".join(lines)


def ladder_plot(record: ExperimentRecord, reach: float | None = None) -> Plot | None:
    """Measured runs, the law and its band, up to ``reach`` FLOPs or twice the largest compute; None without a fit."""
    try:
        fit = fit_ladder(record)
    except UsageError:
        return None
    points = ladder_points(record)
    low, high = (math.log(bound(point.compute for point in points)) for bound in (min, max))
    end = min(math.log(reach) if reach else high + math.log(2), high + math.log(MAX_EXTRAPOLATION))
    grid = [fit.predict(math.exp(x)) for x in np.linspace(low, max(high, end) - 1e-9, BAND_POINTS)]
    targets = [
        (float(one.values[LADDER_COMPUTE]), value)
        for one in record.variants
        if one.values.get(LADDER_TARGET) and (value := one.bits_per_byte(record.target)) is not None
    ]
    curves = [
        Curve("trained", [], [(point.compute, point.loss) for point in points], colour=0),
        Curve("fit", [(one.compute, one.loss) for one in grid], colour=0),
        Curve("95% interval", [(one.compute, one.low) for one in grid], colour=8),
        Curve("", [(one.compute, one.high) for one in grid], colour=8),
    ]
    if targets:
        curves.append(Curve("measured afterwards", [], targets, colour=3))
    return Plot(f"{record.name}: bits per byte against compute", "training FLOPs", "bits per byte", curves, log_x=True)
