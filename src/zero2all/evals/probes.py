"""Probes over the checkpoints of a run: values, curves and trends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Literal, TypeVar

from zero2all.base.charts.table import text_table
from zero2all.base.charts.terminal import sparkline
from zero2all.base.console import warn
from zero2all.evals.log_likelihood import score
from zero2all.evals.probe_suite import ProbeSuite, SentenceProbe, load_suite
from zero2all.evals.target import find_target
from zero2all.model import Z2all
from zero2all.parallel import ParallelModel
from zero2all.tokenizer import Tokenizer
from zero2all.track.eval_record import SIGNIFICANT, EvalCurve, EvalLine, append_evals, eval_curves
from zero2all.track.run_view import read_run_view
from zero2all.train import Run

ARROWS = {"rise": "↑", "fall": "↓", "higher": "↑", "lower": "↓"}

KIND = "probes"


@dataclass(frozen=True)
class ProbeResult:
    """The value of a probe for one model."""

    suite: str
    name: str
    kind: str
    language: str
    category: str
    metric: str
    """What the value is: ``probability``, ``bits per byte``, or ``bits per byte apart`` of a contrast."""
    expected: Literal["rise", "fall"]
    value: float
    perplexity: float | None
    """The perplexity of a sentence, per token."""
    digest: str


@dataclass(frozen=True)
class ProbeReport:
    """The probes of one model."""

    target: str
    step: int | None
    """The step of a checkpoint; None for a Hugging Face directory."""
    results: list[ProbeResult]
    curves: list[EvalCurve]
    """Over all checkpoints of the run that were ever evaluated with these suites."""
    recorded: bool
    """Whether the values are in the run's ``evals.jsonl``."""


def evaluate_suite(model: Z2all | ParallelModel, tokenizer: Tokenizer, suite: ProbeSuite) -> list[ProbeResult]:
    """The value of each probe, in the order of the suite.

    >>> evaluate_suite(model, tokenizer, load_suite("english"))
    """
    requests = [probe.requests(tokenizer) for probe in suite.probes]
    scores = iter(score(model, [request for own in requests for request in own]))
    results = []
    for probe, own in zip(suite.probes, requests, strict=True):
        found = [next(scores) for _ in own]
        tokens = len(own[0].continuation)
        results.append(
            ProbeResult(
                suite=suite.name,
                name=probe.name,
                kind=probe.kind,
                language=probe.language,
                category=probe.category,
                metric=probe.metric,
                expected=probe.expected,
                value=probe.value(found),
                perplexity=_exp(found[0].nats / tokens) if isinstance(probe, SentenceProbe) else None,
                digest=probe.digest,
            )
        )
    return results


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # beyond it a float overflows


def default_suites(run: Run | None) -> list[str]:
    """A model of the built-in stories knows nothing else."""
    return ["stories"] if run is not None and run.recipe.evals.stories else ["english", "chinese"]


def evaluate_probes(target: str, suites: Sequence[ProbeSuite] = ()) -> ProbeReport:
    """Evaluate a model, by default on ``default_suites``, and add the values of a run's checkpoint to its
    ``evals.jsonl``."""
    location = find_target(target)
    suites = suites or [load_suite(name) for name in default_suites(location.run)]
    model = location.load_model()
    results = [one for suite in suites for one in evaluate_suite(model, location.tokenizer, suite)]
    if location.run is None or location.step is None:
        return ProbeReport(target, location.step, results, [], recorded=False)
    lines = probe_lines(location.step, results)
    try:
        append_evals(location.directory, lines)
    except PermissionError as error:
        warn(f"the values are not recorded, so 'z2a watch' will not show them: {error}")
        return ProbeReport(target, location.step, results, eval_curves(lines), recorded=False)
    names = {(KIND, suite.name, probe.name) for suite in suites for probe in suite.probes}
    curves = read_run_view(location.directory).eval_curves()
    curves = [curve for curve in curves if (curve.kind, curve.suite, curve.name) in names]
    return ProbeReport(target, location.step, results, curves, recorded=True)


def probe_lines(step: int, results: Sequence[ProbeResult]) -> list[EvalLine]:
    """The probes of a checkpoint as lines of the run's ``evals.jsonl``."""
    now = round(time.time(), 3)
    return [
        EvalLine(
            kind=KIND,
            suite=result.suite,
            name=result.name,
            step=step,
            value=result.value,
            metric=result.metric,
            better="higher" if result.expected == "rise" else "lower",
            group=f"{result.language} {result.category}",
            digest=result.digest,
            time=now,
        )
        for result in results
    ]


Row = TypeVar("Row", ProbeResult, EvalCurve)


def format_probes(report: ProbeReport) -> str:
    """A table of values, or with several checkpoints of curves and their trends."""
    if any(len(curve.values) > 1 for curve in report.curves):
        return "\n\n".join(_format_curves(suite, curves) for suite, curves in _by_suite(report.curves).items())
    return "\n\n".join(_format_values(suite, own) for suite, own in _by_suite(report.results).items())


def _by_suite(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.suite, []).append(row)
    return found


def _format_values(suite: str, results: Sequence[ProbeResult]) -> str:
    head = ("probe", "group", "value", "", "expected")
    rows = [
        (
            result.name,
            f"{result.language} {result.category}",
            _number(result.value),
            result.metric + ("" if result.perplexity is None else f" (perplexity {_number(result.perplexity)})"),
            ARROWS[result.expected],
        )
        for result in results
    ]
    return "\n".join([f"suite {suite}: {len(results)} probes", _align([head, *rows])])


def _format_curves(suite: str, curves: Sequence[EvalCurve]) -> str:
    head = ("probe", "group", "first", "curve", "last", "metric", "expected", "tau", "p (Holm)")
    rows = [
        (
            curve.name,
            curve.group,
            _number(curve.values[0]),
            sparkline(curve.values),
            _number(curve.values[-1]),
            curve.metric,
            ARROWS[curve.better],
            "" if curve.tau is None else f"{curve.tau:+.2f}",
            "" if curve.p is None else f"{curve.p:.2g}" + (" *" if curve.p < SIGNIFICANT else ""),
        )
        for curve in curves
    ]
    steps = sorted({step for curve in curves for step in curve.steps})
    title = f"suite {suite}: {len(curves)} probes, {len(steps)} checkpoints ({steps[0]} to {steps[-1]} steps)"
    return "\n".join([title, _align([head, *rows]), _verdict(curves, len(steps))])


def _verdict(curves: Sequence[EvalCurve], checkpoints: int) -> str:
    trending = sum(curve.p is not None and curve.p < SIGNIFICANT for curve in curves)
    test = f"(one-sided Mann-Kendall test, p < {SIGNIFICANT} after Holm's correction)"
    verdict = f"{trending} of {len(curves)} probes trend as expected {test}"
    needed = next(count for count in range(3, 100) if len(curves) / math.factorial(count) < SIGNIFICANT)
    if checkpoints < needed:
        verdict += f"; {len(curves)} probes need at least {needed} checkpoints for that"
    return verdict


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    return indent(text_table(rows, right=False), "  ")
