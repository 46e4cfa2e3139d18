"""``z2a eval report``: the evaluations of runs and their checkpoints side by side, as Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from zero2all.charts.page import html_page
from zero2all.charts.plot import Curve, Plot
from zero2all.charts.svg import line_svg
from zero2all.errors import UsageError
from zero2all.evals.verdicts import verdicts
from zero2all.findings import Finding
from zero2all.track.eval_record import EvalCurve
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.track.trend import SIGNIFICANT
from zero2all.train import Run

KINDS = {"loss": "Loss", "bench": "Benchmarks", "probes": "Probes"}
Key = tuple[str, str, str]
"""Kind, suite and name of a curve."""


@dataclass(frozen=True)
class RunEvals:
    """The evaluations of a run."""

    name: str
    curves: list[EvalCurve]
    verdicts: list[Finding]


def read_evals(targets: Sequence[str]) -> list[RunEvals]:
    """The evaluations of runs, as ``z2a eval watch`` and ``z2a eval probes`` have recorded them."""
    found = []
    for target in targets:
        run = Run.open(Path(target))
        view = RunView(LocalRunLocation(run.directory))
        view.read_to_end()
        curves = view.eval_curves()
        if not curves:
            raise UsageError(f"{target} has no evaluations of checkpoints: 'z2a eval watch {target} --once' makes them")
        found.append(RunEvals(target, curves, verdicts(curves, run.tokenizer().vocab_size)))
    return found


def report_markdown(runs: Sequence[RunEvals]) -> str:
    """A table for each kind: the newest value of each run, how it has changed, and whether that is a trend."""
    parts = ["# Evaluation", ""]
    for kind, title in KINDS.items():
        keys = [key for key in _keys(runs) if key[0] == kind]
        if keys:
            parts += [f"## {title}", "", *_table(runs, keys), ""]
    for run in runs:
        if run.verdicts:
            items = [f"- {_cell(f'{verdict.what}: {verdict.text}')}" for verdict in run.verdicts]
            parts += [f"## What it says: {_cell(run.name)}", "", *items, ""]
    parts.append("Newest checkpoint, and the first one in brackets.")
    parts.append(f"* trend in the better direction, p < {SIGNIFICANT} after Holm's correction")
    return "\n".join(parts) + "\n"


def report_html(runs: Sequence[RunEvals]) -> str:
    """The same with a plot of each metric over the checkpoints; one file, no script, nothing loaded from elsewhere."""
    parts = ["<h1>Evaluation</h1>"]
    for run in runs:
        items = "".join(f"<li>{escape(f'{verdict.what}: {verdict.text}')}</li>" for verdict in run.verdicts)
        parts.append(f"<h2>{escape(run.name)}</h2><ul>{items}</ul>")
    for kind, title in KINDS.items():
        keys = [key for key in _keys(runs) if key[0] == kind]
        if keys:
            parts.append(f"<h2>{title}</h2>{_html_table(runs, keys)}")
            parts += [line_svg(plot, inline=True) for key in keys if (plot := _plot(runs, key)) is not None]
    return html_page("Evaluation", "".join(parts))


def _keys(runs: Sequence[RunEvals]) -> list[Key]:
    return list(dict.fromkeys((curve.kind, curve.suite, curve.name) for run in runs for curve in run.curves))


def _find(run: RunEvals, key: Key) -> EvalCurve | None:
    return next((curve for curve in run.curves if (curve.kind, curve.suite, curve.name) == key), None)


def _rows(runs: Sequence[RunEvals], keys: Sequence[Key]) -> list[list[str]]:
    rows = [["suite", "name", *(run.name for run in runs)]]
    for key in keys:
        rows.append([key[1], key[2], *(_value(_find(run, key)) for run in runs)])
    return rows


def _value(curve: EvalCurve | None) -> str:
    if curve is None:
        return "-"
    error = "" if curve.errors[-1] is None else f" ± {curve.errors[-1]:.3f}"
    first = f" ({curve.values[0]:.4g})" if len(curve.values) > 1 else ""
    mark = " *" if curve.p is not None and curve.p < SIGNIFICANT else ""
    return f"{curve.values[-1]:.4g}{error}{first}{mark}"


def _table(runs: Sequence[RunEvals], keys: Sequence[Key]) -> list[str]:
    head, *rows = _rows(runs, keys)
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]


def _cell(text: str) -> str:
    """Names of runs and test sets are data, not markup."""
    return "".join(f"\\{character}" if character in "\\|<>`[]" else character for character in text)


def _html_table(runs: Sequence[RunEvals], keys: Sequence[Key]) -> str:
    head, *rows = _rows(runs, keys)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + f"</tr>{body}</table>"


def _plot(runs: Sequence[RunEvals], key: Key) -> Plot | None:
    """The metric over the steps of all runs that have it at several checkpoints."""
    found = [(run.name, curve) for run in runs if (curve := _find(run, key)) is not None and len(curve.steps) > 1]
    curves = [
        Curve(
            name, [(float(step), value) for step, value in zip(curve.steps, curve.values, strict=True)], colour=number
        )
        for number, (name, curve) in enumerate(found)
    ]
    return Plot(f"{key[1]}: {key[2]}", "step", found[0][1].metric, curves) if found else None
