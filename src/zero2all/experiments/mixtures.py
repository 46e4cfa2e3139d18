"""Mixture search: runs with random weights of the sources, and what a fit to them says.

The share of each source is recorded as the value of ``train.mixture.<source>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.base.charts.plot import MAX_CURVES, Curve, Plot
from zero2all.base.errors import UsageError
from zero2all.base.io import write_text
from zero2all.experiments.mixture_fit import Fit, best_mixture, effect_interval, fit_response
from zero2all.experiments.statistics import rank_correlation
from zero2all.experiments.target import show_target, validation_sources
from zero2all.experiments.variants import ExperimentPlan, VariantGroup, make_plan, parse_axis
from zero2all.recipe import Recipe, load_recipe, recipe_yaml
from zero2all.tokens import TokenStore
from zero2all.track.experiment_record import (
    MAX_VARIANTS,
    MIXTURE_SEARCH,
    ExperimentRecord,
    MixtureFit,
    MixtureSource,
    VariantRecord,
)

Array = np.ndarray[Any, Any]
SHARE_KEY = "train.mixture."
RECIPE_GROUP = "recipe"
EQUAL_GROUP = "equal"
SUGGESTION_FILE = "suggested.yaml"
# For the Dirichlet distribution, times the number of sources: from nearly single sources to nearly the center.
CONCENTRATIONS = (0.5, 1.0, 2.0)
CANDIDATES = 20  # for each random mixture
MIN_SHARE = 0.001  # every run has some of every source
SHARE_DIGITS = 4
MIXTURES_PER_SOURCE = 2  # at least
MAX_MIXTURES = 512
USEFUL_ERROR = 0.8  # relative to the error of the mean; a fit to noise reaches it about once in 20 times
PERCENT = 0.01
CURVE_POINTS = 25


def plan_mixtures(
    path: Path,
    overrides: Sequence[str],
    mixtures: int,
    seeds: int,
    name: str | None = None,
    target: dict[str, float] | None = None,
) -> ExperimentPlan:
    """The mixture of the recipe, equal weights, and random mixtures around the recipe's.

    The runs ignore ``train.max_epochs``, which would change their mixtures. An empty target is the mean over all
    validation sources. Missing stages are built, because the shares of a recipe without ``train.mixture`` come from
    its tokens.
    """
    from zero2all.experiments.stages import build_missing_stages

    if grids := [word for word in overrides if len(parse_axis(word)[1]) > 1]:
        raise UsageError(f"{grids[0]}: --mixtures varies only the mixture; give every key one value")
    recipe = load_recipe(path, list(overrides))
    if own := [stage.name for stage in recipe.train.stages if stage.mixture is not None]:
        raise UsageError(
            f"stage {', '.join(own)} has its own mixture, which a search would not change: remove it, or search the "
            "mixture with a recipe of that stage alone"
        )
    build_missing_stages(recipe, target or {})
    shares = recipe_shares(recipe)
    _check_number(mixtures, seeds, len(shares))
    groups = [
        _mixture_group(label, path, overrides, recipe, drawn)
        for label, drawn in _draw_mixtures(shares, mixtures, recipe.seed).items()
    ]
    keys = [f"{SHARE_KEY}{source}" for source in shares]
    valid = TokenStore(recipe.tokens_dir, "valid")
    target = target or dict.fromkeys(validation_sources(valid, recipe.train.seq_len), 1.0)
    return make_plan(name or "mixtures", MIXTURE_SEARCH, keys, groups, seeds, target)


def recipe_shares(recipe: Recipe) -> dict[str, float]:
    """Share of each source in the samples of a recipe: by its mixture, or else by size."""
    tokens = TokenStore(recipe.tokens_dir, "train").source_tokens
    seq_len = max(recipe.train.keys_by_seq_len())
    weights = recipe.train.mixture or {source: float(count) for source, count in tokens.items() if count > seq_len}
    if short := [source for source in weights if tokens.get(source, 0) <= seq_len]:
        raise UsageError(f"train.mixture names {', '.join(short)}, without a full sequence of training text")
    return {source: weight / sum(weights.values()) for source, weight in weights.items()}


def _check_number(mixtures: int, seeds: int, sources: int) -> None:
    if sources < 2:
        raise UsageError(f"there is nothing to mix: the recipe trains on {sources} source")
    if mixtures < MIXTURES_PER_SOURCE * sources:
        raise UsageError(
            f"--mixtures {mixtures} is too few for {sources} sources: use at least {MIXTURES_PER_SOURCE * sources}, "
            f"better {4 * sources}"
        )
    if mixtures > MAX_MIXTURES:
        raise UsageError(f"--mixtures {mixtures} is more than a search can have ({MAX_MIXTURES})")
    if mixtures * seeds > MAX_VARIANTS:
        raise UsageError(f"{mixtures * seeds} runs are more than an experiment can have ({MAX_VARIANTS})")


def _draw_mixtures(shares: dict[str, float], count: int, seed: int) -> dict[str, dict[str, float]]:
    """Mixtures by label. A random one depends on the ones before it, not on how many there are: more extend a search.

    As in RegMix, the center of the distribution is the mixture of the recipe with the square roots of its shares, so
    that small sources are seen with large shares too. Of several candidates the one farthest from all mixtures before
    it is taken (by Hellinger distance): a dozen independent draws leave much of the range to luck.
    """
    center = np.sqrt(list(shares.values()))
    center /= center.sum()
    drawn = {RECIPE_GROUP: _round_shares(np.array(list(shares.values())))}
    equal = _round_shares(np.full(len(shares), 1 / len(shares)))
    if equal != drawn[RECIPE_GROUP]:
        drawn[EQUAL_GROUP] = equal
    for number in range(count - len(drawn)):
        concentration = CONCENTRATIONS[number % len(CONCENTRATIONS)] * len(shares)
        candidates = np.random.default_rng([seed, number]).dirichlet(concentration * center, size=CANDIDATES)
        before = np.array(list(drawn.values()))
        distances = np.sum((np.sqrt(candidates)[:, None] - np.sqrt(before)) ** 2, axis=2).min(axis=1)
        drawn[f"mixture-{number + 1}"] = _round_shares(candidates[distances.argmax()])
    return {label: dict(zip(shares, values, strict=True)) for label, values in drawn.items()}


def _round_shares(shares: Array) -> list[float]:
    raised = np.maximum(shares, MIN_SHARE)
    return [round(share, SHARE_DIGITS) for share in (raised / raised.sum()).tolist()]


def _mixture_group(
    label: str, path: Path, overrides: Sequence[str], recipe: Recipe, shares: dict[str, float]
) -> VariantGroup:
    stages = [stage.model_copy(update={"max_epochs": None}) for stage in recipe.train.stages]
    train = recipe.train.model_copy(update={"mixture": shares, "max_epochs": None, "stages": stages})
    values: dict[str, int | float | str] = {f"{SHARE_KEY}{source}": share for source, share in shares.items()}
    return VariantGroup(label, path, list(overrides), recipe.model_copy(update={"train": train}), values)


@dataclass(frozen=True)
class _Measured:
    """The mixtures of a search that have results, means over their seeds."""

    sources: list[str]
    target: Array
    """Weights of the validation sources, with the sum 1."""
    recipe: Array
    """Shares of the mixture of the recipe."""
    shares: Array
    """[mixtures, sources]"""
    values: Array
    """[mixtures, validation sources of the target], bits per byte"""


def analyze_mixtures(record: ExperimentRecord) -> tuple[MixtureFit, Plot] | None:
    """The fit and its plot; None until all runs have ended, or if too few have a result."""
    if any(variant.state not in ("done", "failed") for variant in record.variants):
        return None
    measured = _measured_mixtures(record)
    if measured is None or len(measured.shares) < MIXTURES_PER_SOURCE * len(measured.sources):
        return None
    fit = fit_response(measured.shares, measured.values, measured.target)
    return _describe_fit(record, measured, fit), _response_plot(record, measured, fit)


def _measured_mixtures(record: ExperimentRecord) -> _Measured | None:
    """None without a target or a result of the recipe's mixture, as in a record that no search has written."""
    runs: dict[str, list[list[float]]] = {}
    shares: dict[str, list[float]] = {}
    for variant in record.variants:
        own = _shares_of(variant, record.keys)
        values = [variant.bits_per_byte({source: 1.0}) for source in record.target]
        known = [value for value in values if value is not None]
        if own is not None and len(known) == len(values) > 0:
            shares[variant.group] = own
            runs.setdefault(variant.group, []).append(known)
    recipe = next((_shares_of(one, record.keys) for one in record.variants if one.group == RECIPE_GROUP), None)
    if recipe is None or not runs:
        return None
    target = np.array(list(record.target.values()))
    return _Measured(
        sources=[key.removeprefix(SHARE_KEY) for key in record.keys],
        target=target / target.sum(),
        recipe=np.array(recipe),
        shares=np.array(list(shares.values())),
        values=np.array([np.mean(values, axis=0) for values in runs.values()]),
    )


def _shares_of(variant: VariantRecord, keys: Sequence[str]) -> list[float] | None:
    values = [variant.values.get(key) for key in keys]
    shares = [float(value) for value in values if isinstance(value, int | float) and 0 <= value <= 1]
    return shares if len(shares) == len(keys) > 0 else None


def _describe_fit(record: ExperimentRecord, measured: _Measured, fit: Fit) -> MixtureFit:
    target, at = measured.target, measured.recipe
    effects = fit.response.effects(at)
    low, high = effect_interval(fit, measured.shares, measured.values, target, at)
    suggested = None
    if fit.error < USEFUL_ERROR * fit.mean_error:
        suggested = best_mixture(fit.response, measured.shares, target)
    sources = [
        MixtureSource(
            source=source,
            recipe=float(at[number]),
            suggested=None if suggested is None else round(float(suggested[number]), 3),
            effect=PERCENT * float(effects[number] @ target),
            low=PERCENT * float(low[number]),
            high=PERCENT * float(high[number]),
            effects={name: PERCENT * float(effects[number, column]) for column, name in enumerate(record.target)},
        )
        for number, source in enumerate(measured.sources)
    ]
    return MixtureFit(
        mixtures=len(measured.shares),
        error=fit.error,
        mean_error=fit.mean_error,
        rank_correlation=rank_correlation((measured.values @ target).tolist(), fit.predicted.tolist()),
        recipe_bits_per_byte=float(fit.response.predict(at) @ target),
        suggested_bits_per_byte=None if suggested is None else float(fit.response.predict(suggested) @ target),
        sources=sources,
    )


def _response_plot(record: ExperimentRecord, measured: _Measured, fit: Fit) -> Plot:
    """Predicted target over the share of each source, the others in the proportion of the recipe. A point is the
    recipe."""
    curves = []
    for number, source in enumerate(measured.sources):
        own = float(measured.recipe[number])
        shares = np.linspace(measured.shares[:, number].min(), measured.shares[:, number].max(), CURVE_POINTS)
        mixtures = measured.recipe * ((1 - shares) / max(1 - own, 1e-9))[:, None]
        mixtures[:, number] = shares
        predicted = fit.response.predict(mixtures) @ measured.target
        line = [(round(x, 6), round(y, 6)) for x, y in zip(shares.tolist(), predicted.tolist(), strict=True)]
        here = round(float(fit.response.predict(measured.recipe) @ measured.target), 6)
        curves.append(Curve(source, line, [(own, here)], colour=number))
    title = f"{record.name}: predicted bits per byte ({show_target(record.target)})"
    return Plot(title, "share of the source", "bits per byte", curves[:MAX_CURVES])


def write_suggestion(recipe: Recipe, record: ExperimentRecord, directory: Path) -> Path | None:
    """Write the recipe with the suggested mixture, as a run of its own name; an earlier file is removed if there is no
    suggestion. A source without a share is not in the mixture."""
    path = directory / SUGGESTION_FILE
    mixture = {one.source: one.suggested for one in record.fit.sources if one.suggested} if record.fit else {}
    if not mixture:
        path.unlink(missing_ok=True)
        return None
    name = f"{record.name}-suggested"
    train = recipe.train.model_copy(update={"mixture": mixture})
    places = {"name": name, "run": name, "out": recipe.out.absolute()}
    write_text(path, recipe_yaml(recipe.model_copy(update={**places, "train": train})))
    return path
