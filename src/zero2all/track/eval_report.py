"""What the evaluations of runs say, in words and side by side as Markdown: ``z2a eval report`` and the model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.charts.table import markdown_table
from zero2all.base.errors import UsageError
from zero2all.base.findings import Finding
from zero2all.track.eval_record import SIGNIFICANT, EvalCurve
from zero2all.track.run_view import read_run_view

KINDS = {"loss": "Loss", "bench": "Benchmarks", "probes": "Probes"}
Key = tuple[str, str, str]
"""Kind, suite and name of a curve."""
GOOD_NATS = 2.0  # per token, on general knowledge: what pretraining teams expect of a base model that is worth aligning
STEADY_EVALUATIONS = 4

BITS_PER_BYTE, NATS_PER_TOKEN = "bits per byte", "nats per token"
CENTERED_ACCURACY, ANSWER_BITS = "centered accuracy", "answer bits per byte"


@dataclass(frozen=True)
class RunEvals:
    """The evaluations of a run."""

    name: str
    curves: list[EvalCurve]
    verdicts: list[Finding]


def read_evals(name: str, directory: Path, vocab_size: int) -> RunEvals:
    """The evaluations of a run, as ``z2a eval watch`` and ``z2a eval probes`` have recorded them."""
    curves = read_run_view(directory).eval_curves()
    if not curves:
        raise UsageError(f"{name} has no evaluations of checkpoints: 'z2a eval watch {name} --once' makes them")
    return RunEvals(name, curves, verdicts(curves, vocab_size))


def report_markdown(runs: Sequence[RunEvals]) -> str:
    """A table for each kind: the newest value of each run, how it has changed, and whether that is a trend."""
    parts = ["# Evaluation", ""]
    for kind, title in KINDS.items():
        keys = [key for key in _keys(runs) if key[0] == kind]
        if keys:
            head, *rows = (map(_cell, row) for row in _rows(runs, keys))
            parts += [f"## {title}", "", markdown_table(list(head), rows), ""]
    for run in runs:
        if run.verdicts:
            items = [f"- {_cell(f'{verdict.what}: {verdict.text}')}" for verdict in run.verdicts]
            parts += [f"## What it says: {_cell(run.name)}", "", *items, ""]
    parts.append("Newest checkpoint, and the first one in brackets.")
    parts.append(f"* trend in the better direction, p < {SIGNIFICANT} after Holm's correction")
    return "\n".join(parts) + "\n"


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


def _cell(text: str) -> str:
    """Names of runs and test sets are data, not markup."""
    return "".join(f"\\{character}" if character in "\\|<>`[]" else character for character in text)


def verdicts(curves: Sequence[EvalCurve], vocab_size: int) -> list[Finding]:
    """A finding for each thing worth knowing. ``vocab_size`` tells what a nat per token means."""
    by_key = {(curve.kind, curve.suite, curve.name): curve for curve in curves}
    found: list[Finding] = []
    for curve in curves:
        if curve.kind == "loss":
            found += _loss_verdicts(curve, vocab_size)
        elif curve.kind == "bench" and curve.name == CENTERED_ACCURACY:
            found += _bench_verdicts(curve, by_key.get(("bench", curve.suite, ANSWER_BITS)))
    return found + list(_probe_verdicts(curves))


def _loss_verdicts(curve: EvalCurve, vocab_size: int) -> Iterator[Finding]:
    last = curve.values[-1]
    if curve.suite == NATS_PER_TOKEN:
        side = "below" if last < GOOD_NATS else "above"
        why = f"{last:.2f} nats per token, {side} {GOOD_NATS:g} (tokenizer of {vocab_size:,} tokens)"
        yield Finding("good" if last < GOOD_NATS else "note", curve.name, why)
    elif curve.suite == BITS_PER_BYTE and curve.name == "all" and len(curve.values) >= STEADY_EVALUATIONS:
        recent = curve.values[-STEADY_EVALUATIONS:]
        rises = [
            (step, after - before) for step, before, after in zip(curve.steps[-3:], recent, recent[1:], strict=False)
        ]
        step, rise = max(rises, key=lambda one: one[1])
        if rise <= 0:
            yield Finding("good", "loss", f"steady: it fell in the last {STEADY_EVALUATIONS - 1} evaluations")
        else:
            yield Finding("note", "loss", f"unsteady: bits per byte rose by {rise:.4f} to step {step}", step=step)


def _bench_verdicts(accuracy: EvalCurve, answer: EvalCurve | None) -> Iterator[Finding]:
    last, error = accuracy.values[-1], accuracy.errors[-1]
    if error is None:
        return
    if last - error > 0:
        yield Finding("good", accuracy.suite, f"above chance, centered accuracy {last:.3f} ± {error:.3f}")
        return
    trend = ""
    if answer is not None and answer.p is not None:
        trend = ", which improves" if answer.p < SIGNIFICANT else ", which shows no trend yet"
    yield Finding("note", accuracy.suite, "at chance", f"look at the bits per byte of the right answer{trend}")


def _probe_verdicts(curves: Sequence[EvalCurve]) -> Iterator[Finding]:
    for suite in dict.fromkeys(curve.suite for curve in curves if curve.kind == "probes"):
        own = [curve for curve in curves if (curve.kind, curve.suite) == ("probes", suite)]
        trending = sum(curve.p is not None and curve.p < SIGNIFICANT for curve in own)
        if any(curve.p is not None for curve in own):
            why = f"{trending} of {len(own)} trend as expected"
            yield Finding("good" if trending == len(own) else "note", f"probes {suite}", why)
