"""Results of evaluations as lines of a run's ``evals.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zero2all.evals.bench import BenchResult, Estimate
from zero2all.evals.loss_report import CONFIDENCE, LossReport, loss_rows
from zero2all.io import fingerprint
from zero2all.track.eval_record import RESERVED, EvalLine

BITS_PER_BYTE, NATS_PER_TOKEN = "bits per byte", "nats per token"
CENTERED_ACCURACY, ANSWER_BITS = "centered accuracy", "answer bits per byte"


def loss_lines(step: int, report: LossReport) -> list[EvalLine]:
    """The losses of a checkpoint: of all text, by source and by test set."""
    now, lines = round(time.time(), 3), []
    for label, metrics in loss_rows(report.evaluation).items():
        name = "".join(" " if character in RESERVED else character for character in label)
        digest = fingerprint([report.evaluation.scoring, metrics.bytes])
        for suite, value, error in (
            (BITS_PER_BYTE, metrics.bits_per_byte, metrics.bits_per_byte_error),
            (NATS_PER_TOKEN, metrics.loss, metrics.loss_error),
        ):
            if value is not None:
                lines.append(
                    EvalLine(
                        kind="loss",
                        suite=suite,
                        name=name,
                        step=step,
                        value=value,
                        metric=suite,
                        better="lower",
                        digest=digest,
                        error=None if error is None else CONFIDENCE * error,
                        time=now,
                    )
                )
    return lines


def bench_lines(step: int, results: Sequence[BenchResult]) -> list[EvalLine]:
    """The scores of a checkpoint on benchmarks, in the form in which each was asked first."""
    now, lines = round(time.time(), 3), []
    for result in results:
        for name, estimate in (
            (CENTERED_ACCURACY, result.centered_accuracy),
            (ANSWER_BITS, result.answer_bits_per_byte),
        ):
            if estimate is not None:
                lines.append(_bench_line(step, result, name, estimate, now))
    return lines


def _bench_line(step: int, result: BenchResult, name: str, estimate: Estimate, now: float) -> EvalLine:
    return EvalLine(
        kind="bench",
        suite=result.task,
        name=name,
        step=step,
        value=estimate.value,
        metric=name,
        better="higher" if name == CENTERED_ACCURACY else "lower",
        digest=fingerprint([result.form, result.shots, result.items]),
        error=(estimate.high - estimate.low) / 2,
        time=now,
    )
