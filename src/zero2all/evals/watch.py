"""``z2a eval watch`` evaluates each new checkpoint of a run beside training, which never waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from zero2all.base.console import say, warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.findings import Finding
from zero2all.base.io import MANIFEST, fingerprint
from zero2all.base.plugins import PluginSpec, split_spec
from zero2all.checkpoint.training_state import read_lineage
from zero2all.evals.bench import BenchOptions, BenchResult, run_bench
from zero2all.evals.bench.tasks import find_tasks
from zero2all.evals.loss_report import CONFIDENCE, LossOptions, LossReport, loss_rows, report_loss
from zero2all.evals.probe_suite import ProbeSuite
from zero2all.evals.probes import evaluate_suite, probe_lines
from zero2all.evals.target import EvalTarget, TargetLocation, find_target
from zero2all.track.eval_record import RESERVED, EvalLine, append_evals
from zero2all.track.eval_report import ANSWER_BITS, BITS_PER_BYTE, CENTERED_ACCURACY, NATS_PER_TOKEN, verdicts
from zero2all.track.run_view import read_run_view
from zero2all.train import Run

NICE = 10  # a run on the same cores goes first
Wait = Callable[[float], None]
Part = tuple[str, str]
"""Kind and suite of an evaluation."""


@dataclass(frozen=True)
class WatchOptions:
    """What each checkpoint is evaluated on. The validation set and the test sets of the run always are."""

    suites: tuple[ProbeSuite, ...] = ()
    data: Path | None = None
    """Directory with the files of benchmarks; None for no benchmarks."""
    tasks: tuple[PluginSpec, ...] = ()
    """Benchmarks; empty for all in ``data``."""
    limit: int | None = 200
    """Items of a benchmark, the same ones for every checkpoint."""

    def benchmarks(self) -> dict[str, PluginSpec]:
        """Benchmarks by name."""
        tasks = () if self.data is None else self.tasks or find_tasks(self.data)
        return {split_spec(task)[0]: task for task in tasks}


@dataclass(frozen=True)
class WatchReport:
    """What a watcher did until the run or it ended."""

    run: str
    evaluated: list[int]
    """Steps of the checkpoints."""
    failed: dict[int, str]
    """Checkpoints that could not be evaluated, and why."""
    verdicts: list[Finding]


def watch_run(
    target: str, options: WatchOptions, poll_seconds: float = 30.0, *, once: bool = False, wait: Wait = time.sleep
) -> WatchReport:
    """Evaluate every checkpoint that is not yet in the run's ``evals.jsonl``, until the run has ended.

    With ``once``, evaluate those that are there. A watcher that is stopped is continued by the same call.
    """
    run = Run.open(target)
    options = replace(options, tasks=options.tasks or tuple(run.recipe.evals.benchmarks))
    if options.data is not None and not options.benchmarks():
        raise UsageError(f"{options.data} has no files of a known benchmark")
    os.nice(NICE)
    evaluated: list[int] = []
    failed: dict[int, str] = {}
    while True:
        has_ended = _has_ended(run)  # before the look at checkpoints: the last one is written before the end
        for step, missing in _pending(run, options, failed).items():
            try:
                _evaluate(find_target(str(run.directory), step), options, missing)
            except (Z2aError, OSError) as error:  # retention may remove a checkpoint while it is read
                failed[step] = str(error)
                warn(f"checkpoint {step} is left out: {error}")
                continue
            evaluated.append(step)
            for verdict in _verdicts(run):
                say(str(verdict))
        if once or has_ended:
            return WatchReport(target, evaluated, failed, _verdicts(run))
        wait(poll_seconds)


def _has_ended(run: Run) -> bool:
    return read_run_view(run.directory).ended is not None


def _pending(run: Run, options: WatchOptions, failed: dict[int, str]) -> dict[int, set[Part]]:
    """What is missing of each checkpoint."""
    view = read_run_view(run.directory)
    known = {(curve.kind, curve.suite, step) for curve in view.eval_curves() for step in curve.steps}
    wanted = list(_wanted(run, options))
    steps = sorted(run.checkpoints.current_steps(read_lineage(run.directory)))
    missing = {step: {part for part in wanted if (*part, step) not in known} for step in steps if step not in failed}
    return {step: parts for step, parts in missing.items() if parts}


def _wanted(run: Run, options: WatchOptions) -> Iterator[Part]:
    if (run.recipe.tokens_dir / MANIFEST).exists():  # it has texts
        yield "loss", BITS_PER_BYTE
    yield from (("probes", suite.name) for suite in options.suites)
    yield from (("bench", name) for name in options.benchmarks())


def _evaluate(location: TargetLocation, options: WatchOptions, missing: set[Part]) -> None:
    """Evaluate one checkpoint. Values are appended as soon as each kind is known."""
    assert location.step is not None
    say(f"checkpoint {location.step}")
    model, step, directory = location.load_model(), location.step, location.directory
    if ("loss", BITS_PER_BYTE) in missing:
        append_evals(directory, loss_lines(step, report_loss(location, model, LossOptions())))
    for suite in options.suites:
        if ("probes", suite.name) in missing:
            append_evals(directory, probe_lines(step, evaluate_suite(model, location.tokenizer, suite)))
    tasks = [spec for name, spec in sorted(options.benchmarks().items()) if ("bench", name) in missing]
    if options.data is not None and tasks:
        target = EvalTarget(model, location.tokenizer, location.name, step, directory)
        report = run_bench([target], options.data, tasks, BenchOptions(limit=options.limit))
        append_evals(directory, bench_lines(step, report.results))


def _verdicts(run: Run) -> list[Finding]:
    return verdicts(read_run_view(run.directory).eval_curves(), run.tokenizer().vocab_size)


def loss_lines(step: int, report: LossReport) -> list[EvalLine]:
    """The losses of a checkpoint: of all text, by source and by test set."""
    now, lines = round(time.time(), 3), []
    for label, metrics in loss_rows(report.evaluation).items():
        name = "".join(" " if character in RESERVED else character for character in label)
        digest = fingerprint([report.evaluation.scoring, metrics.bytes])
        line = partial(EvalLine, kind="loss", name=name, step=step, better="lower", digest=digest, time=now)
        for suite, value, error in (
            (BITS_PER_BYTE, metrics.bits_per_byte, metrics.bits_per_byte_error),
            (NATS_PER_TOKEN, metrics.loss, metrics.loss_error),
        ):
            if value is not None:
                half = None if error is None else CONFIDENCE * error
                lines.append(line(suite=suite, metric=suite, value=value, error=half))
    return lines


def bench_lines(step: int, results: Sequence[BenchResult]) -> list[EvalLine]:
    """The scores of a checkpoint on benchmarks, in the form in which each was asked first."""
    now, lines = round(time.time(), 3), []
    for result in results:
        digest = fingerprint([result.form, result.shots, result.items])
        line = partial(EvalLine, kind="bench", suite=result.task, step=step, digest=digest, time=now)
        estimates = {CENTERED_ACCURACY: result.centered_accuracy, ANSWER_BITS: result.answer_bits_per_byte}
        for name, estimate in estimates.items():
            if estimate is not None:
                half = (estimate.high - estimate.low) / 2
                better: Literal["higher", "lower"] = "higher" if name == CENTERED_ACCURACY else "lower"
                lines.append(line(name=name, metric=name, value=estimate.value, better=better, error=half))
    return lines
