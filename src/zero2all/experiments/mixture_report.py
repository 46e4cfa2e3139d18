"""What a mixture search says: a table of its mixtures, one of the sources, and the fit in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from zero2all.experiments.mixtures import MIXTURES_PER_SOURCE, SHARE_KEY
from zero2all.experiments.plots import show_value
from zero2all.experiments.tables import UNKNOWN, show_bits
from zero2all.experiments.target import show_target
from zero2all.track.experiment_record import MIXTURE_SEARCH, ExperimentRecord, MixtureFit, MixtureSource
from zero2all.units import show_count

MAX_COLUMNS = 8  # of sources


def mixture_rows(record: ExperimentRecord) -> list[list[str]]:
    """A mixture in each row, the best one first, with the shares of the first sources."""
    keys = record.keys[:MAX_COLUMNS]
    shares = {variant.group: [show_value(variant.values.get(key)) for key in keys] for variant in record.variants}
    rows = [["", "seeds", "bits per byte", *(key.removeprefix(SHARE_KEY) for key in keys)]]
    for number, group in enumerate(record.groups):
        is_best = number == 0 and group.bits_per_byte is not None
        name = f"{'* ' if is_best else '  '}{group.group}"
        rows.append([name, str(len(group.seeds)), show_bits(group), *shares[group.group]])
    return rows


def source_rows(fit: MixtureFit) -> list[list[str]]:
    """Shares of each source, and the effect of 1 % more of it on the target and on its validation sources."""
    validated = list(fit.sources[0].effects)[:MAX_COLUMNS]
    rows = [["source", "recipe", "suggested", "1 % more", "95 % interval", *(f"on {name}" for name in validated)]]
    for one in fit.sources:
        suggested = UNKNOWN if one.suggested is None else f"{one.suggested:.3f}"
        interval = f"{one.low:+.4f} to {one.high:+.4f}"
        on = [f"{one.effects[name]:+.4f}" for name in validated]
        rows.append([one.source, f"{one.recipe:.3f}", suggested, f"{one.effect:+.4f}", interval, *on])
    return rows


def mixture_remarks(record: ExperimentRecord) -> Iterator[str]:
    if record.kind != MIXTURE_SEARCH:
        return
    if record.fit is None:
        needed = MIXTURES_PER_SOURCE * len(record.keys)
        known = len(record.values_by_group())
        open_runs = sum(variant.state not in ("done", "failed") for variant in record.variants)
        why = (
            f"{open_runs} runs have not ended" if open_runs else f"{known} mixtures have a result, {needed} are needed"
        )
        yield f"there is no fit yet: {why}"
        return
    yield from _fit_remarks(record.fit)
    tokens = max((group.tokens or 0 for group in record.groups), default=0)
    yield f"1 % of the tokens of a run is {show_count(tokens / 100)} tokens"
    yield from map(effect_text, record.fit.sources)


def _fit_remarks(fit: MixtureFit) -> Iterator[str]:
    yield (
        f"the fit to {fit.mixtures} mixtures has a leave-one-out error of {fit.error:.4f} bits per byte (the mean as "
        f"prediction: {fit.mean_error:.4f}) and a rank correlation of {fit.rank_correlation:.2f}"
    )
    if fit.suggested_bits_per_byte is None:
        yield (
            "it does not predict clearly better than the mean, so there is no suggestion: use more mixtures, "
            "longer runs, or more seeds"
        )
        return
    gain = fit.recipe_bits_per_byte - fit.suggested_bits_per_byte
    doubt = "" if gain > fit.error else ", a difference within the error of the fit"
    yield (
        f"predicted bits per byte: {fit.suggested_bits_per_byte:.4f} with the suggested mixture, "
        f"{fit.recipe_bits_per_byte:.4f} with that of the recipe{doubt}"
    )


def check_command(record: ExperimentRecord, suggestion: Path) -> str:
    """The command that trains the suggestion and the recipe with several seeds."""
    given = record.variants[0]
    overrides = [word for word in given.overrides if not word.startswith("train.mixture")]
    words = ["z2a", "compare", str(suggestion), given.recipe, *overrides, "--seeds", "3"]
    words += ["--budget", record.budget] if record.budget else []
    return shlex.join([*words, "--target", show_target(record.target)])


def effect_text(source: MixtureSource) -> str:
    """One sentence on what a source gives."""
    if source.low <= 0 <= source.high:
        interval = f"{source.effect:+.4f} ({source.low:+.4f} to {source.high:+.4f})"
        return f"1 % more of {source.source} has no effect beyond the noise: {interval} bits per byte"
    verb = "lowers" if source.effect < 0 else "raises"
    low, high = sorted((abs(source.low), abs(source.high)))
    size = f"{abs(source.effect):.4f} ({low:.4f} to {high:.4f})"
    return f"1 % more of {source.source} {verb} the target by {size} bits per byte"
