"""``z2a plan --try``: short trial runs find the fastest way to compute a recipe, and write a copy with it.

Every trial is recorded when it ends, so a tuner that is killed at any moment is continued by the same command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from zero2all.base.charts.table import UNKNOWN, text_table
from zero2all.base.console import heading, say, warn
from zero2all.base.directory_lock import LockUser, lock_directory
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import fingerprint, read_record, write_record, write_text
from zero2all.base.machine.devices import pick_gpu
from zero2all.base.machine.gpu_specs import Gpu
from zero2all.experiments.budget import choose_batch, trial_recipe
from zero2all.experiments.runner import MAX_REASON, run_trial
from zero2all.experiments.tune_grid import TuneCandidate, TuneGrid, build_grid, with_values
from zero2all.experiments.tune_search import Finalist, Point, find_fastest
from zero2all.experiments.variants import ExperimentPlan, VariantGroup, make_plan
from zero2all.planner.calibrated import find_entry
from zero2all.planner.cluster import Cluster
from zero2all.recipe import Recipe, load_recipe, recipe_yaml
from zero2all.recipe.edit import edit_recipe
from zero2all.train.micro_batch import free_device_memory

FORMAT = 1
TUNE_FILE = "tune.json"  # in the directory of the experiment
TUNED_SUFFIX = ".tuned.yaml"
UNKNOWN_MEMORY = 1 << 60


@dataclass(frozen=True)
class TuneTrial:
    """One trial run."""

    candidate: str
    overrides: list[str]
    is_final: bool
    """Whether it is of the rounds in which finalists take turns."""
    seconds: float | None
    """Median of a step after warm-up; None if it failed."""
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class TuneRecord:
    """``tune.json``."""

    format: int
    key: str
    """Fingerprint of the recipe and the options."""
    memory: int
    """Bytes of a rank that were free at the first start: which candidates there are depends on it."""
    trials: list[TuneTrial] = field(default_factory=list)


@dataclass(frozen=True)
class TuneRow:
    """One candidate that was tried."""

    candidate: str
    overrides: list[str]
    planned: float
    """Planned speed, relative to the recipe as it is."""
    tokens_per_second: float | None
    note: str


@dataclass(frozen=True)
class TuneReport:
    rows: list[TuneRow]
    """Finalists first, the winner first of all."""
    speedup: float | None
    """The speedup of the winner, relative to the recipe as it is; None if that could not be run."""
    candidates: int
    """The number of candidates that are valid and fit."""
    too_large: int
    """The number of candidates that do not fit by the plan."""
    held: dict[str, str]
    """What was not tuned because it would change the result, and why."""
    trials: int
    out: str
    """The recipe that was written."""


@dataclass(frozen=True)
class TuneOptions:
    ranks: int = 1
    steps: int = 8
    """The number of steps that a speed is measured on, at least."""
    rounds: int = 3
    """The number of rounds of the finalists."""
    gpu: str | None = None
    """For the plan: a GPU, or the file of ``z2a doctor --calibrate``. Default: this machine."""


def tune_recipe(path: Path, words: Sequence[str], options: TuneOptions) -> TuneReport:
    """Find the fastest candidate, and write the recipe with it beside the recipe, as ``.tuned.yaml``."""
    from zero2all.experiments.stages import build_missing_stages

    loaded = load_recipe(path, list(words))
    if loaded.train.stages:
        raise UsageError("the recipe has stages, whose speeds differ: remove train.stages, and tune each shape alone")
    out = path.with_name(f"{path.name if path.is_dir() else path.stem}{TUNED_SUFFIX}")
    group = VariantGroup("tune", path, list(words), loaded, {})
    plan = make_plan(f"tune-{path.stem}", "tune", [], [group], seeds=1)
    with lock_directory(plan.directory, LockUser("tuner", plan.directory, "out=DIR"), patience=0):
        build_missing_stages(plan.variants[0].recipe, {})
        trials = Trials(plan, words, options)
        finalists = trials.run()
    report = _report(trials, finalists, out)
    text = recipe_yaml(load_recipe(path)) if path.is_dir() else path.read_text(encoding="utf-8")
    write_text(out, edit_recipe(text, [*words, *report.rows[0].overrides], str(path)))
    return report


class Trials:
    """Runs trials, and answers from the record those that an earlier call has run."""

    def __init__(self, plan: ExperimentPlan, words: Sequence[str], options: TuneOptions) -> None:
        self.directory, self.options, self.done = plan.directory, options, 0
        self.path = plan.directory / TUNE_FILE
        self.recipe = choose_batch(plan.variants[0].recipe)
        device = tuned_device(self.recipe)
        self.record = self._open_record(fingerprint([plan.variants[0].record.key, options]), device)
        cluster = Cluster.of(_machine(options.gpu, device, self.record.memory), options.ranks)
        vocab = {"model.vocab_size": self.recipe.model.vocab_size or self.recipe.tokenizer.vocab_size}
        fixed = {word.partition("=")[0].strip() for word in words}
        self.grid: TuneGrid = build_grid(with_values(self.recipe, vocab), cluster, device, fixed)

    def _open_record(self, key: str, device: torch.device) -> TuneRecord:
        if not self.path.exists():
            # On a GPU a trial that does not fit fails cleanly, and a plan needs no context there.
            free = free_device_memory(device, self.options.ranks) if device.type == "cpu" else None
            return TuneRecord(FORMAT, key, free or UNKNOWN_MEMORY)
        record = read_record(TuneRecord, self.path)
        if record.key != key:
            raise UsageError(f"{self.directory} is of another recipe or other options: remove it")
        return record

    def run(self) -> list[Finalist]:
        grid, known = self.grid, len(self.record.trials)
        if len(grid.candidates) < 2:
            raise UsageError("there is nothing to tune: give fewer keys on the command line")
        resumed = f", {known} trials done" if known else ""
        heading(f"tuning over {len(grid.candidates)} candidates{resumed}, in {self.directory}")
        finalists = find_fastest(grid.candidates, grid.starts, self.measure, self.options.rounds)
        if not finalists:
            failed = next(trial for trial in self.record.trials if trial.seconds is None)
            raise Z2aError(f"no candidate could be measured; {failed.candidate}: {failed.reason}")
        return finalists

    def measure(self, point: Point, is_final: bool) -> float | None:
        number, candidate = self.done, self.grid.candidates[point]
        self.done += 1
        if number < len(self.record.trials):
            known = self.record.trials[number]
            if (known.overrides, known.is_final) == (candidate.overrides, is_final):
                return known.seconds
            # An earlier version searched in another order.
            self.record = replace(self.record, trials=self.record.trials[:number])
        trial = self._run(candidate, number, is_final=is_final)
        self.record = replace(self.record, trials=[*self.record.trials, trial])
        write_record(self.path, self.record)
        return trial.seconds

    def _run(self, candidate: TuneCandidate, number: int, *, is_final: bool) -> TuneTrial:
        recipe = trial_recipe(with_values(self.recipe, candidate.values))
        options, title = self.options, f"trial {number + 1}{', final round' if is_final else ''}: {candidate.label}"
        seconds, reason = run_trial(self.directory, recipe, f"trial-{number + 1:03}", options.ranks, options.steps)
        if seconds is None:
            warn(f"{title}: failed: {reason}")
        else:
            say(f"{title}: {self.tokens_per_second(seconds):,.0f} tokens per second")
        return TuneTrial(candidate.label, candidate.overrides, is_final, seconds, reason[:MAX_REASON])

    def tokens_per_second(self, seconds: float) -> float:
        return self.recipe.train.tokens_per_step / seconds


def tuned_device(recipe: Recipe) -> torch.device:
    """Where trials train. Nothing is allocated there: all its memory is for them."""
    wanted = recipe.train.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _machine(gpu: str | None, device: torch.device, memory: int) -> Gpu:
    """The entry that candidates are planned with. Only the ratios of planned times matter."""
    if gpu is not None:
        return find_entry(gpu)
    if device.type == "cuda":
        return pick_gpu()
    flops, bandwidth, link = 2e11, 2e10, 5e9
    source = "nominal: two cores with AVX-512; z2a doctor --calibrate measures"
    return Gpu("CPU", flops, 1, 16, memory, bandwidth, "memory", link, link, source, fp32_flops=flops / 2)


def _report(trials: Trials, finalists: list[Finalist], out: Path) -> TuneReport:
    grid, measured = trials.grid, trials.record.trials[: trials.done]
    own = next((one for one in finalists if one.point == grid.own), None)
    final = {grid.candidates[one.point].label: one for one in finalists}
    by_label = {candidate.label: candidate for candidate in grid.candidates.values()}
    rows = [
        _row(trials, by_label[label], [one for one in measured if one.candidate == label], final.get(label))
        for label in dict.fromkeys([*final, *(one.candidate for one in measured)])
    ]
    order = list(final)
    rows.sort(key=lambda row: order.index(row.candidate) if row.candidate in final else len(order))
    others = sorted(rows[len(order) :], key=lambda row: -(row.tokens_per_second or 0.0))
    winner = replace(rows[0], note=f"winner, {rows[0].note}")
    return TuneReport(
        rows=[winner, *rows[1 : len(order)], *others],
        speedup=None if own is None else own.relative / finalists[0].relative,
        candidates=len(grid.candidates),
        too_large=grid.too_large,
        held=grid.held,
        trials=len(measured),
        out=str(out),
    )


def _row(trials: Trials, candidate: TuneCandidate, tried: list[TuneTrial], finalist: Finalist | None) -> TuneRow:
    own = trials.grid.candidates[trials.grid.own].step
    times = [one.seconds for one in tried if one.seconds is not None]
    failed = next((one.reason for one in tried if one.seconds is None), None)
    seconds = finalist.seconds if finalist is not None else median(times) if times else None
    note = f"median of {trials.options.rounds} rounds" if finalist is not None else ""
    return TuneRow(
        candidate=candidate.label,
        overrides=candidate.overrides,
        planned=own / candidate.step,
        tokens_per_second=None if seconds is None else trials.tokens_per_second(seconds),
        note=note if failed is None else f"failed: {failed}",
    )


def tune_text(report: TuneReport) -> str:
    rows = [["candidate", "planned", "tokens/s", "note"]]
    for row in report.rows:
        speed = UNKNOWN if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        rows.append([row.candidate, f"{row.planned:.2f}x", speed, row.note])
    lines = [text_table(rows), ""]
    lines.append(f"{report.trials} trials for {report.candidates} candidates; {report.too_large} more do not fit")
    lines += [f"{name} stays as in the recipe: {why}" for name, why in report.held.items()]
    if not report.rows[0].overrides:
        lines.append("the recipe as it is is the fastest")
    elif report.speedup is not None:
        lines.append(f"{report.rows[0].candidate}: {report.speedup:.2f} times as fast as the recipe")
    lines.append(f"recipe written to {report.out}")
    return "\n".join(lines)
