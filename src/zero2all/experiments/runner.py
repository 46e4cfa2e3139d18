"""The runner of every experiment: trains and evaluates variants one after another, and records what becomes of each.

The record is written at every change, so a runner that is killed at any moment is continued by the same call:
variants that are done are not repeated, and one that was interrupted resumes from its newest checkpoint.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from zero2all.base.console import ProgressTask, heading, progress, say, warn
from zero2all.base.directory_lock import LockUser, lock_directory
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_record, write_text
from zero2all.base.processes import hold_back_interrupts
from zero2all.base.units import show_count, show_seconds
from zero2all.cluster.launch.exit_reason import classify_exit
from zero2all.experiments.budget import (
    TRIAL_RUN,
    Budget,
    choose_batch,
    fix_length,
    parse_budget,
    refuse_stages,
    speed_key,
    trial_recipe,
    warmup_remark,
)
from zero2all.experiments.evaluate import run_result, saved_evaluation
from zero2all.experiments.summary import summarize
from zero2all.experiments.variant_process import start_variant
from zero2all.experiments.variants import ExperimentPlan, Variant
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.track.experiment_record import (
    EXPERIMENT_FILE,
    FORMAT,
    ExperimentRecord,
    VariantRecord,
    VariantResult,
    read_experiment,
)
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.train import Run

POLL_SECONDS = 0.5
STOP_SECONDS = 120.0  # for a variant to save a checkpoint when the experiment is stopped
STALL_SECONDS = 900.0  # of a trial without a step, the first of which may compile
TRIAL_SECONDS = 3.0  # of steps that a speed is measured on, at least,
MIN_TRIAL_STEPS = 4  # and this many of them
WARMUP_STEPS = 2  # before them
MAX_REASON = 500  # characters


def run_experiment(plan: ExperimentPlan, budget: str | None = None, ranks: int = 1) -> ExperimentRecord:
    """Train and evaluate every variant that is not done, in the order of the plan.

    An experiment of the same name is continued, and extended by variants that it does not have. It is an error if one
    of its variants would change, or its budget.
    """
    with lock_directory(plan.directory, LockUser("runner", plan.directory, "--name NAME"), patience=0):
        return _Runner(plan, budget, ranks).run()


class _Runner:
    def __init__(self, plan: ExperimentPlan, budget: str | None, ranks: int) -> None:
        self.plan, self.ranks = plan, ranks
        self.budget = None if budget is None else parse_budget(budget)
        self.path = plan.directory / EXPERIMENT_FILE
        self.variants = {variant.record.name: variant for variant in plan.variants}
        # Summarized, because another target changes the summary of runs that are all done.
        self.record = summarize(self._merge(read_experiment(self.path) if self.path.exists() else None))

    def _merge(self, before: ExperimentRecord | None) -> ExperimentRecord:
        """The record with the variants that are new in the plan."""
        plan, text = self.plan, None if self.budget is None else self.budget.text
        asked = [variant.record for variant in plan.variants]
        if before is None:
            return ExperimentRecord(FORMAT, plan.name, plan.kind, plan.keys, text, plan.target, variants=asked)
        known = {record.name: record for record in before.variants}
        changed = [record.name for record in asked if record.name in known and record.key != known[record.name].key]
        advice = f"choose another --name, or remove {plan.directory}"
        if (before.kind, before.keys) != (plan.kind, plan.keys):
            was = f"{before.kind} of {', '.join(before.keys) or 'recipes'}"
            raise UsageError(f"experiment {plan.name} is a {was}: {advice}")
        if before.budget != text:
            was, now = before.budget or "the length in the recipe", text or "the length in the recipe"
            raise UsageError(f"the budget of experiment {plan.name} is {was}, not {now}: {advice}")
        if changed:
            raise UsageError(f"the recipe of {changed[0]} in experiment {plan.name} was another one: {advice}")
        added = [record for record in asked if record.name not in known]
        return replace(before, target=plan.target, variants=[*before.variants, *added])

    def run(self) -> ExperimentRecord:
        todo = [variant for name, variant in self.variants.items() if self._find(name).state != "done"]
        if self.budget is not None:
            for variant in todo:
                refuse_stages(variant.recipe)
        self._build_stages(todo)
        self._save()
        if self.budget is not None and self.budget.seconds is not None:
            self._measure_speeds(todo, self.budget)
        recipes = {variant.record.name: self._sized_recipe(variant) for variant in todo}
        if self.budget is not None:
            remarks = [warmup_remark(recipe, self.budget) for recipe in recipes.values()]
            for remark in dict.fromkeys(remark for remark in remarks if remark is not None):
                warn(remark)
        done = len(self.record.variants) - len(todo)
        known = f", {done} of them done" if done else ""
        heading(f"experiment {self.plan.name}: {len(self.record.variants)} runs{known}, in {self.plan.directory}")
        with progress(self.plan.name, len(todo)) as task:
            for variant in todo:
                self._run_variant(variant, recipes[variant.record.name], task)
        if not self.record.values_by_group():
            failed = next(record for record in self.record.variants if record.state == "failed")
            raise Z2aError(f"every run failed; {failed.name}: {failed.reason}")
        return self.record

    def _build_stages(self, todo: list[Variant]) -> None:
        # Here, because the process of a variant imports this package too, and does without the code of a corpus.
        from zero2all.experiments.stages import build_missing_stages

        for recipe in {variant.recipe.tokens_dir: variant.recipe for variant in todo}.values():
            build_missing_stages(recipe, self.plan.target)

    def _run_variant(self, variant: Variant, recipe: Recipe, task: ProgressTask) -> None:
        name = variant.record.name
        number = [record.name for record in self.record.variants].index(name) + 1
        title = f"run {number} of {len(self.record.variants)}, {variant.record.group}, seed {variant.record.seed}"
        steps = recipe.train.steps if self.budget and self.budget.seconds else None
        self._update(name, state="running", reason="", result=None, steps=steps)
        view = RunView(LocalRunLocation(recipe.run_dir))
        follow = _Follower(view, title, task)
        try:
            reason = run_process(self.plan.directory, recipe, name, self.ranks, follow)
        except KeyboardInterrupt:
            self._update(name, state="stopped")
            raise
        if not reason:
            try:
                result = _read_result(recipe.run_dir)
            except Z2aError as error:
                reason = str(error)
        if reason:
            self._update(name, state="failed", reason=reason[:MAX_REASON])
            warn(f"{title}: failed: {reason}")
        else:
            self._update(name, state="done", result=result)
            value = self._find(name).bits_per_byte(self.record.target)
            shown = "no plausible" if value is None else f"{value:.4f}"
            say(f"{title}: {shown} bits per byte, {show_seconds(result.seconds)}")
        follow.finish()

    def _measure_speeds(self, todo: list[Variant], budget: Budget) -> None:
        """Time the steps of each kind of variant in a short run, once: the number of steps is then fixed."""
        for variant in todo:
            sized = choose_batch(variant.recipe)
            key = speed_key(sized)
            if key in self.record.step_seconds:
                continue
            say(f"measuring the speed of {variant.record.group}")
            trial = trial_recipe(sized)
            seconds, reason = run_trial(self.plan.directory, trial, TRIAL_RUN, self.ranks, MIN_TRIAL_STEPS)
            if seconds is None:
                raise Z2aError(f"the speed of {variant.record.group} could not be measured: {reason}")
            self.record = replace(self.record, step_seconds={**self.record.step_seconds, key: seconds})
            self._save()
            steps = fix_length(sized, budget, self.record.step_seconds).train.steps
            rate = show_count(sized.train.tokens_per_step / seconds)
            say(f"{rate} tokens per second: {budget.text} is {steps} steps")

    def _sized_recipe(self, variant: Variant) -> Recipe:
        if self.budget is None:
            return variant.recipe
        recipe = variant.recipe if self.budget.seconds is None else choose_batch(variant.recipe)
        return fix_length(recipe, self.budget, self.record.step_seconds)

    def _find(self, name: str) -> VariantRecord:
        return next(record for record in self.record.variants if record.name == name)

    def _update(self, name: str, **changes: object) -> None:
        variants = [
            replace(record, **changes) if record.name == name else record  # type: ignore[arg-type]
            for record in self.record.variants
        ]
        self.record = summarize(replace(self.record, variants=variants))
        self._save()

    def _save(self) -> None:
        write_record(self.path, self.record)


def run_process(directory: Path, recipe: Recipe, name: str, ranks: int, on_poll: Callable[[], bool]) -> str:
    """Run a variant of the experiment in a directory until it has ended, or until ``on_poll`` returns True. Returns why
    it failed, or nothing."""
    recipe_path = directory / "recipes" / f"{name}.yaml"
    log_path = directory / "logs" / f"{name}.log"
    write_text(recipe_path, recipe_yaml(recipe))
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "ab") as log:
        begin = log.tell()
        process: subprocess.Popen[bytes] | None = None
        try:
            with hold_back_interrupts():
                process = start_variant(recipe_path, ranks, log)
            while process.poll() is None:
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if on_poll():
                        return ""
        except KeyboardInterrupt:
            if process is not None:
                say(f"stopping {name}; its state will be saved")
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
            raise
        finally:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    return "" if process.returncode == 0 else _failure(process.returncode, log_path, begin)


def run_trial(directory: Path, recipe: Recipe, name: str, ranks: int, steps: int) -> tuple[float | None, str]:
    """Train a few steps. Returns the median seconds of a step after warm-up, or None and why there is none."""
    shutil.rmtree(recipe.run_dir, ignore_errors=True)  # of a killed runner
    watch = _TrialWatch(RunView(LocalRunLocation(recipe.run_dir)), steps)
    try:
        reason = run_process(directory, recipe, name, ranks, watch)
        times = watch.read_times()
    finally:
        shutil.rmtree(recipe.run_dir, ignore_errors=True)
    if not reason and len(times) <= steps:
        reason = f"it made no {steps} steps after warm-up; see {directory / 'logs' / name}.log"
    return (None, reason) if reason else (float(np.median(np.diff(times))), "")


class _TrialWatch:
    """Called while a trial runs: whether to end it."""

    def __init__(self, view: RunView, steps: int) -> None:
        self.view, self.steps = view, steps
        self.seen, self.last_change = 0, time.monotonic()

    def read_times(self) -> np.ndarray:
        """The times of the steps after warm-up."""
        self.view.refresh()
        return self.view.table([]).times[WARMUP_STEPS:]

    def __call__(self) -> bool:
        times = self.read_times()
        if len(self.view.table([]).times) != self.seen:
            self.seen, self.last_change = len(self.view.table([]).times), time.monotonic()
        if time.monotonic() - self.last_change > STALL_SECONDS:
            return True
        return len(times) > self.steps and float(times[-1] - times[0]) > TRIAL_SECONDS


class _Follower:
    """Shows how far a variant is. A run counts as one, so that the time left covers the whole experiment."""

    def __init__(self, view: RunView, title: str, task: ProgressTask) -> None:
        self.view, self.title, self.task = view, title, task
        self.share = 0.0
        task.describe(title)

    def __call__(self) -> bool:
        self.view.refresh()
        step, steps = self.view.last_step, self.view.total_steps
        if step is not None and steps:
            self.task.describe(f"{self.title}, step {step + 1} of {steps}")
            self._advance(min(1.0, (step + 1) / steps))
        return False

    def finish(self) -> None:
        self._advance(1.0)

    def _advance(self, share: float) -> None:
        if share > self.share:
            self.task(share - self.share)
            self.share = share


def _read_result(directory: Path) -> VariantResult:
    run = Run.open(directory)
    evaluation = saved_evaluation(run)
    if evaluation is None:
        raise Z2aError(f"{directory} has no evaluation of its newest checkpoint")
    return run_result(run, evaluation)


def _failure(status: int, log: Path, begin: int) -> str:
    """The last error that a process printed, or what its exit status says."""
    with open(log, "rb") as stream:
        stream.seek(begin)
        lines = stream.read().decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"{classify_exit(status, '').description}; see {log}"
