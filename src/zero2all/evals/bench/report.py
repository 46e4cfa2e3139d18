"""Metrics of benchmarks, with confidence intervals, and what a comparison of two evaluations shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zero2all.base.charts.table import text_table
from zero2all.evals.bench.evaluate import ItemResult
from zero2all.evals.bench.memorization import Contamination
from zero2all.evals.validation_loss import ratio_error

ORIGINAL = "original"
Metric = Literal["accuracy", "centered_accuracy", "answer_bits_per_byte"]

Array = np.ndarray[Any, Any]
Z_95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {(self.high - self.low) / 2:.3f}"

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def proportion(successes: Array) -> Estimate:
    """The mean of zeros and ones, with Wilson's interval, which is wide where few items are all wrong or all right."""
    count, share = len(successes), float(np.mean(successes))
    center = (share + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
    spread = share * (1 - share) / count + Z_95**2 / (4 * count**2)
    margin = Z_95 / (1 + Z_95**2 / count) * math.sqrt(spread)
    return Estimate(share, max(0.0, center - margin), min(1.0, center + margin))


def ratio(numerators: Array, denominators: Array) -> Estimate | None:
    """The ratio of two sums over items, by the delta method; None without any denominator."""
    if not denominators.sum() > 0:
        return None
    return _normal(numerators.sum() / denominators.sum(), ratio_error([(numerators, denominators)]))


def paired_difference(first: tuple[Array, Array], second: tuple[Array, Array]) -> Estimate | None:
    """The second ratio minus the first, over the same items in the same order, whose residuals are subtracted."""
    if not (first[1].sum() > 0 and second[1].sum() > 0):
        return None
    (before, of_first), (after, of_second) = (_ratio_and_residuals(*terms) for terms in (first, second))
    residuals = of_second - of_first
    error = math.sqrt(len(residuals) * residuals.var(ddof=1)) if len(residuals) > 1 else None
    return _normal(after - before, error)


def mean_of_ratios(ratios: list[tuple[Array, Array]]) -> Estimate:
    """The mean of the ratios of several sets of items, which are independent of each other."""
    values = [numerators.sum() / denominators.sum() for numerators, denominators in ratios]
    errors = [ratio_error([terms]) or 0.0 for terms in ratios]
    return _normal(float(np.mean(values)), math.hypot(*errors) / len(ratios))


def _ratio_and_residuals(numerators: Array, denominators: Array) -> tuple[float, Array]:
    """A ratio of sums, and what each item adds to its error."""
    total = denominators.sum()
    value = float(numerators.sum() / total)
    return value, (numerators - value * denominators) / total


def _normal(value: float, error: float | None) -> Estimate:
    margin = Z_95 * (error or 0.0)
    return Estimate(float(value), float(value) - margin, float(value) + margin)


@dataclass(frozen=True)
class BenchEvaluation:
    """The answers of one model to one version of a benchmark."""

    target: str
    """Its name, with the step of a checkpoint."""
    task: str
    form: str
    """``cloze``, ``letter`` or ``cot``; ``generate`` where nothing is chosen."""
    shots: int
    mutation: str
    items: list[ItemResult]


@dataclass(frozen=True)
class BenchResult:
    """Metrics of an evaluation."""

    target: str
    task: str
    form: str
    shots: int
    mutation: str
    items: int
    accuracy: Estimate
    chance: float
    """Accuracy of random answers."""
    centered_accuracy: Estimate
    """0 at chance, 1 if all is right."""
    accuracy_per_byte: Estimate | None
    """Where the texts of options are scored: with log-likelihoods divided by bytes."""
    answer_bits_per_byte: Estimate | None
    """-log2 P(right answer) over its bytes. It improves long before the accuracy leaves chance."""


@dataclass(frozen=True)
class Difference:
    """A metric of the second evaluation minus the first's, on the items that both have."""

    target: str
    """The one of the second evaluation."""
    task: str
    form: str
    mutation: str
    first: str
    second: str
    metric: Metric
    items: int
    first_value: float
    second_value: float
    difference: Estimate

    @property
    def is_significant(self) -> bool:
        return not self.difference.contains(0.0)


@dataclass(frozen=True)
class BenchReport:
    """All results of a command."""

    results: list[BenchResult]
    differences: list[Difference]
    core: dict[str, Estimate]
    """Scores by target: the mean of the centered accuracies of tasks, as the CORE metric of DCLM, from two tasks on."""
    contamination: list[Contamination]
    """The result of each task, if items were compared with the training documents."""
    notes: list[str]


def summarize(evaluation: BenchEvaluation) -> BenchResult:
    items = evaluation.items
    chance = float(np.mean([item.chance for item in items]))
    accuracy = proportion(_array([item.is_right for item in items]))
    per_byte = [item.is_right_per_byte for item in items if item.is_right_per_byte is not None]
    return BenchResult(
        evaluation.target,
        evaluation.task,
        evaluation.form,
        evaluation.shots,
        evaluation.mutation,
        len(items),
        accuracy,
        chance,
        Estimate(*((value - chance) / (1 - chance) for value in (accuracy.value, accuracy.low, accuracy.high))),
        proportion(_array(per_byte)) if len(per_byte) == len(items) else None,
        ratio(*_answer_bits(items)),
    )


def core(evaluations: Sequence[BenchEvaluation]) -> Estimate | None:
    """The mean of centered accuracies over tasks; None for a single task."""
    ratios = [_centered_accuracy(evaluation.items) for evaluation in evaluations]
    return mean_of_ratios(ratios) if len(ratios) > 1 else None


def compare(
    first: BenchEvaluation, second: BenchEvaluation, names: tuple[str, str], metrics: Sequence[Metric]
) -> list[Difference]:
    """Paired differences, on the items that both evaluations have."""
    by_id = {item.id: item for item in second.items}
    pairs = [(item, by_id[item.id]) for item in first.items if item.id in by_id]
    if not pairs:
        return []
    differences = []
    for metric in metrics:
        values = _TERMS[metric]
        before, after = values([one for one, _ in pairs]), values([other for _, other in pairs])
        difference = paired_difference(before, after)
        if difference is not None:
            means = [float(one.sum() / total.sum()) for one, total in (before, after)]
            where = (second.target, second.task, second.form, second.mutation)
            differences.append(Difference(*where, *names, metric, len(pairs), means[0], means[1], difference))
    return differences


def format_report(report: BenchReport) -> str:
    """Tables of results and differences."""
    several = len({result.target for result in report.results}) > 1
    rows = [["task", "form", "version", "items", "accuracy", "chance", "centered", "per byte", "answer bits/byte"]]
    for result in report.results:
        name = f"{result.target}: {result.task}" if several else result.task
        form = f"{result.form}, {result.shots}-shot" if result.shots else result.form
        rows.append(
            [
                name,
                form,
                result.mutation,
                str(result.items),
                str(result.accuracy),
                f"{result.chance:.3f}",
                f"{result.centered_accuracy.value:.3f}",
                "-" if result.accuracy_per_byte is None else str(result.accuracy_per_byte),
                "-" if result.answer_bits_per_byte is None else str(result.answer_bits_per_byte),
            ]
        )
    parts = [text_table(rows, right=False)]
    parts += [f"mean of centered accuracies, {name}: {estimate}" for name, estimate in report.core.items()]
    if report.differences:
        header = ["task", "form", "from", "to", "metric", "difference", "items"]
        parts += ["", text_table([header, *map(_row, report.differences)], right=False)]
        parts.append("* the 95% confidence interval excludes 0")
    return "\n".join([*parts, *map(str, report.contamination), *report.notes])


def _row(one: Difference) -> list[str]:
    mark = " *" if one.is_significant else ""
    interval = f"{one.difference.value:+.3f} [{one.difference.low:+.3f}, {one.difference.high:+.3f}]{mark}"
    return [one.task, one.form, one.first, one.second, one.metric, interval, str(one.items)]


def _accuracy(items: Sequence[ItemResult]) -> tuple[Array, Array]:
    return _array([item.is_right for item in items]), np.ones(len(items))


def _centered_accuracy(items: Sequence[ItemResult]) -> tuple[Array, Array]:
    return _array([item.is_right - item.chance for item in items]), _array([1 - item.chance for item in items])


def _answer_bits(items: Sequence[ItemResult]) -> tuple[Array, Array]:
    return _array([item.nats / math.log(2) for item in items]), _array([item.bytes for item in items])


def _array(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)


# Numerators and denominators of each metric, over items.
_TERMS: dict[Metric, Callable[[Sequence[ItemResult]], tuple[Array, Array]]] = {
    "accuracy": _accuracy,
    "centered_accuracy": _centered_accuracy,
    "answer_bits_per_byte": _answer_bits,
}
