"""What a comparison or a mixture search says: tables, verdicts and remarks, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from zero2all.base.charts.table import UNKNOWN, text_table
from zero2all.base.console import sanitize
from zero2all.base.io import read_json
from zero2all.base.units import show_count, show_seconds
from zero2all.experiments.comparison import Comparison
from zero2all.experiments.mixtures import MIXTURES_PER_SOURCE, SHARE_KEY
from zero2all.experiments.summary import show_value
from zero2all.experiments.target import show_target
from zero2all.track.experiment_record import (
    MIXTURE_SEARCH,
    ExperimentRecord,
    GroupSummary,
    MixtureFit,
    MixtureSource,
    VariantRecord,
    Verdict,
)

MAX_COLUMNS = 8  # of sources

MAX_DIFFERENCES = 20  # keys
MAX_VALUE = 40  # characters of a value
SAME_BYTES = 0.01  # relative difference up to which two tokenizers were measured on the same text
ENVIRONMENT_KEYS = ("device", "torch", "zero2all")


@dataclass(frozen=True)
class Report:
    experiment: ExperimentRecord
    directories: dict[str, str]
    differences: dict[str, dict[str, Any]]
    verdicts: list[str]
    remarks: list[str]


def build_report(comparison: Comparison) -> Report:
    record = comparison.record
    return Report(
        experiment=record,
        directories={name: str(path) for name, path in comparison.directories.items()},
        differences=comparison.differences(),
        verdicts=list(_verdict_lines(record)),
        remarks=[
            *_target_remarks(record),
            *_comparability_remarks(comparison),
            *_sweep_remarks(record),
            *_noise_remarks(comparison),
            *mixture_remarks(record),
        ],
    )


def verdict_text(verdict: Verdict) -> str:
    """One sentence on two groups."""
    better, other = verdict.other, verdict.reference
    if verdict.difference > 0:
        better, other = other, better
    size = abs(verdict.difference)
    if verdict.margin is None:
        return f"{better} is better than {other} by {size:.4f} bits per byte; the noise between seeds is unknown"
    if not verdict.is_beyond_noise:
        return (
            f"no difference beyond the noise between seeds: {verdict.difference:+.4f} ± {verdict.margin:.4f} "
            f"bits per byte ({verdict.other} minus {verdict.reference})"
        )
    return f"{better} is better than {other} by {size:.4f} ± {verdict.margin:.4f} bits per byte"


def _verdict_lines(record: ExperimentRecord) -> Iterator[str]:
    if not record.is_sweep:
        yield from map(verdict_text, record.verdicts)
        return
    known = [verdict for verdict in record.verdicts if verdict.margin is not None]
    if not known:
        return
    best = known[0].reference
    within = [f"{one.other} ({one.difference:+.4f} ± {one.margin:.4f})" for one in known if not one.is_beyond_noise]
    if within:
        yield f"{best} is best; not distinguishable from it by the noise between seeds: {', '.join(within)}"
    else:
        yield f"{best} is best, beyond the noise between seeds"


def _target_remarks(record: ExperimentRecord) -> Iterator[str]:
    if record.target:
        yield f"bits per byte are the weighted mean of validation sources: {show_target(record.target)}"


def _comparability_remarks(comparison: Comparison) -> Iterator[str]:
    record = comparison.record
    results = {variant.name: variant.result for variant in record.variants if variant.result is not None}
    if len({result.validation_set for result in results.values()}) > 1:
        yield (
            "the runs have different validation sets, so their bits per byte are not comparable: "
            + "; ".join(_by_value({name: result.validation_set for name, result in results.items()}))
        )
    elif len({result.tokenizer for result in results.values()}) > 1:
        sizes = [result.validation_bytes for result in results.values()]
        yield "the runs have different tokenizers: compare bits per byte, not losses"
        if min(sizes) < (1 - SAME_BYTES) * max(sizes):
            yield (
                f"the tokenizers were measured on {min(sizes)} to {max(sizes)} bytes of the same validation text: "
                "raise evals.tokens until both cover all of it"
            )
    lengths = {name: show_count(result.tokens) for name, result in results.items()}
    if len(set(lengths.values())) > 1:
        yield f"the runs were trained on different numbers of tokens: {'; '.join(_by_value(lengths))}"
    machines = {name: _environment(path) for name, path in comparison.directories.items()}
    if len(set(machines.values())) > 1:
        yield f"the runs were made with different machines or versions: {'; '.join(_by_value(machines))}"


def _environment(directory: Path) -> str:
    path = directory / "environment.json"
    values = read_json(path) if path.exists() else {}
    return ", ".join(f"{key} {values.get(key, '?')}" for key in ENVIRONMENT_KEYS)


def _by_value(values: dict[str, str]) -> Iterator[str]:
    for value in dict.fromkeys(values.values()):
        yield f"{value} ({', '.join(name for name, own in values.items() if own == value)})"


def _sweep_remarks(record: ExperimentRecord) -> Iterator[str]:
    measured = [variant for variant in record.variants if variant.bits_per_byte(record.target) is not None]
    groups = record.values_by_group()
    if record.kind != "sweep" or len(groups) < 2:
        return
    best = next(one for one in measured if one.group == min(groups, key=lambda group: fmean(groups[group])))
    for key in record.keys:
        values = [one.values.get(key) for one in record.variants]
        numbers = sorted({value for value in values if isinstance(value, int | float)})
        own = best.values.get(key)
        if len(numbers) < 2 or own not in (numbers[0], numbers[-1]):
            continue
        end, more = ("smallest", "smaller") if own == numbers[0] else ("largest", "larger")
        yield f"the best {key}, {show_value(own)}, is the {end} that was tried: try {more} ones"


def _noise_remarks(comparison: Comparison) -> Iterator[str]:
    """The command that measures the noise, if it is unknown."""
    record = comparison.record
    counts = [len(values) for values in record.values_by_group().values()]
    if len(counts) < 2 or min(counts) >= 2 or record.kind == MIXTURE_SEARCH:  # whose fit has an error of its own
        return
    if record.kind == "sweep":
        yield "the noise between seeds is unknown: the same command with --seeds 3 adds seeds to this experiment"
        return
    first = {variant.group: variant for variant in reversed(record.variants)}
    recipes = [_recipe_of(first[group], record) for group in dict.fromkeys(one.group for one in record.variants)]
    words = ["z2a", "compare", *recipes, *record.variants[0].overrides, "--seeds", "3"]
    words += ["--budget", record.budget] if record.budget else []
    words += ["--target", show_target(record.target)] if record.target else []
    words += [] if record.kind == "runs" else ["--name", record.name]
    yield f"the noise between seeds is unknown; this measures it: {shlex.join(words)}"


def _recipe_of(variant: VariantRecord, record: ExperimentRecord) -> str:
    return f"{variant.recipe}/recipe.yaml" if record.kind == "runs" else variant.recipe


def report_text(report: Report) -> str:
    """Without the plot."""
    record = report.experiment
    parts = [text_table(mixture_rows(record) if record.kind == MIXTURE_SEARCH else _group_rows(report))]
    if record.fit is not None:
        parts.append(text_table(source_rows(record.fit)))
    if not record.is_sweep and report.differences:
        parts.insert(0, text_table(_difference_rows(report)))
    problems = [f"{group.group}, {problem}" for group in record.groups for problem in group.problems]
    parts += ["\n".join(lines) for lines in (problems, report.verdicts, report.remarks) if lines]
    return sanitize("\n\n".join(parts))


def _show_bits(group: GroupSummary) -> str:
    """The mean over seeds, and their standard deviation if it is known."""
    spread = f" ± {group.spread:.4f}" if group.spread is not None else ""
    return UNKNOWN if group.bits_per_byte is None else f"{group.bits_per_byte:.4f}{spread}"


def _difference_rows(report: Report) -> list[list[str]]:
    groups = [group.group for group in report.experiment.groups]
    rows = [["differs", *groups]]
    for key, values in list(report.differences.items())[:MAX_DIFFERENCES]:
        rows.append([key, *(_shorten(values.get(group)) for group in groups)])
    more = len(report.differences) - MAX_DIFFERENCES
    return rows if more <= 0 else [*rows, [f"and {more} more keys"]]


def _group_rows(report: Report) -> list[list[str]]:
    rows = [["", "seeds", "bits per byte", "best", "steps", "tokens", "tokens/s", "time"]]
    for number, group in enumerate(report.experiment.groups):
        is_best = report.experiment.is_sweep and number == 0 and group.bits_per_byte is not None
        name = f"{'* ' if is_best else '  '}{group.group}"
        if group.bits_per_byte is None:
            rows.append([name, "0", UNKNOWN])
            continue
        best = group.best_bits_per_byte
        rows.append(
            [
                name,
                str(len(group.seeds)),
                _show_bits(group),
                UNKNOWN if best is None else f"{best:.4f}",
                str(group.steps),
                show_count(group.tokens or 0),
                show_count(group.tokens_per_second or 0.0),
                show_seconds(group.seconds or 0.0),
            ]
        )
    return rows


def _shorten(value: object) -> str:
    text = show_value(value) if not isinstance(value, str) else value
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def mixture_rows(record: ExperimentRecord) -> list[list[str]]:
    """A mixture in each row, the best one first, with the shares of the first sources."""
    keys = record.keys[:MAX_COLUMNS]
    shares = {variant.group: [show_value(variant.values.get(key)) for key in keys] for variant in record.variants}
    rows = [["", "seeds", "bits per byte", *(key.removeprefix(SHARE_KEY) for key in keys)]]
    for number, group in enumerate(record.groups):
        is_best = number == 0 and group.bits_per_byte is not None
        name = f"{'* ' if is_best else '  '}{group.group}"
        rows.append([name, str(len(group.seeds)), _show_bits(group), *shares[group.group]])
    return rows


def source_rows(fit: MixtureFit) -> list[list[str]]:
    """Shares of each source, and the effect of 1% more of it on the target and on its validation sources."""
    validated = list(fit.sources[0].effects)[:MAX_COLUMNS]
    rows = [["source", "recipe", "suggested", "1% more", "95% interval", *(f"on {name}" for name in validated)]]
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
    yield f"1% of the tokens of a run is {show_count(tokens / 100)} tokens"
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
        f"{fit.recipe_bits_per_byte:.4f} with the recipe's{doubt}"
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
        return f"1% more of {source.source} has no effect beyond the noise: {interval} bits per byte"
    verb = "lowers" if source.effect < 0 else "raises"
    low, high = sorted((abs(source.low), abs(source.high)))
    size = f"{abs(source.effect):.4f} ({low:.4f} to {high:.4f})"
    return f"1% more of {source.source} {verb} the target by {size} bits per byte"
