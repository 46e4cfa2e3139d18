"""Probes as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from zero2all.charts.terminal import sparkline
from zero2all.evals.probes import ProbeReport, ProbeResult
from zero2all.track.eval_record import EvalCurve
from zero2all.track.trend import SIGNIFICANT

Row = TypeVar("Row", ProbeResult, EvalCurve)
ARROWS = {"rise": "↑", "fall": "↓", "higher": "↑", "lower": "↓"}


def format_probes(report: ProbeReport) -> str:
    """A table of values, or with several checkpoints of curves and their trends."""
    if any(len(curve.values) > 1 for curve in report.curves):
        return "\n\n".join(_format_curves(suite, curves) for suite, curves in _by_suite(report.curves).items())
    results = report.models[-1].results
    return "\n\n".join(_format_values(suite, own) for suite, own in _by_suite(results).items())


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
    return "\n".join([f"suite {suite}: {len(results)} probes", *_align([head, *rows])])


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
    return "\n".join([title, *_align([head, *rows]), _verdict(curves, len(steps))])


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


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
