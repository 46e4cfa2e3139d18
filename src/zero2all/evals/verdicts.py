"""What the evaluations of a run say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zero2all.evals.eval_lines import ANSWER_BITS, BITS_PER_BYTE, CENTERED_ACCURACY, NATS_PER_TOKEN
from zero2all.findings import Finding
from zero2all.track.eval_record import EvalCurve
from zero2all.track.trend import SIGNIFICANT

GOOD_NATS = 2.0  # per token, on general knowledge: what pretraining teams expect of a base model that is worth aligning
STEADY_EVALUATIONS = 4


def verdicts(curves: Sequence[EvalCurve], vocab_size: int) -> list[Finding]:
    """One for each thing worth knowing. ``vocab_size`` tells what a nat per token means."""
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
