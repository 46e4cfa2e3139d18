"""The learning rate of a resumed run: what a changed schedule means for a stage that has begun, and the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from zero2all.base.console import warn
from zero2all.base.errors import UsageError
from zero2all.base.workspace import NEW_RUN_COMMAND
from zero2all.recipe import ExtendMode, ExtensionRecipe, Recipe, ScheduleRecipe
from zero2all.train.plan import Plan, StagePlan

EXPLANATIONS: dict[ExtendMode, str] = {
    "constant": "stays as it is",
    "rewarm": "warms up to {peak:.2e} again over {warmup} steps, then {shape} to the end of the stage",
    "as-planned": "the schedule of the recipe, as if all steps before had followed it",
}


class ScheduleChangedError(UsageError):
    """The trained steps of a stage had other learning rates than the recipe plans; the message lists the choices."""

    def __init__(self, message: str, suggestion: ExtendMode) -> None:
        super().__init__(message)
        self.suggestion: ExtendMode = suggestion
        """The choice for an example: with most steps left for warm-up, it is not rewarm."""


@dataclass(frozen=True)
class ScheduledRun:
    """A recipe and its plan."""

    recipe: Recipe
    plan: Plan

    def with_extensions(self, extensions: Sequence[ExtensionRecipe]) -> ScheduledRun:
        if list(extensions) == self.recipe.train.extensions:
            return self
        train = self.recipe.train.model_copy(update={"extensions": list(extensions)})
        recipe = self.recipe.model_copy(update={"train": train})
        return ScheduledRun(recipe, Plan(recipe, self.plan.store))

    def learning_rate(self, step: int) -> float:
        return self.recipe.train.optimizer.peak_lr * self.plan.stage_of(step).lr_multiplier(step)


def continue_schedule(before: ScheduledRun, now: ScheduledRun, step: int, choice: ExtendMode | None) -> ScheduledRun:
    """``now`` with the extensions of the run, and a new one at ``step`` if the schedule of a begun stage has changed.

    ``before`` is what the last start planned: it has the learning rates of all steps before ``step``. They depend on
    nothing else, so every restart computes the same ones.
    """
    entries, given = before.recipe.train.extensions, now.recipe.train.extensions
    if given != entries[: len(given)]:
        warn("train.extensions of the recipe is ignored: the run has its own, which `--extend` wrote")
    reached = [entry for entry in entries if entry.step < step]
    pending = entries[len(reached) :]  # after a rollback, or if a start has not trained a step
    same_choice = choice is None or not pending or choice == pending[-1].mode
    resumed = now.with_extensions(entries if same_choice and _schedules(before) == _schedules(now) else reached)
    trained, planned = before.plan.stage_of(step - 1), resumed.plan.stage_of(step - 1)
    schedule, steps = _in_force(trained, pending)
    changed_step = _first_changed_step(before.plan, resumed.plan, step)
    if changed_step is not None:
        is_shorter = planned.steps < steps
        if changed_step < trained.first_step or (planned.end_step <= step and not is_shorter):
            raise UsageError(_ended_message(before, resumed, changed_step))
        if is_shorter:
            raise UsageError(
                f"stage {trained.name} has begun with {steps} steps and cannot be shortened to {planned.steps}: its "
                "trained steps would have had other learning rates. Train it to its end, use the newest checkpoint as "
                f"it is, or train another run on the same tokens ({NEW_RUN_COMMAND})"
            )
    elif choice in (None, "as-planned") or planned.schedule == trained.schedule or planned.end_step <= step:
        return resumed

    def extended(mode: ExtendMode) -> ScheduledRun:
        entry = ExtensionRecipe(stage=trained.name, step=step, mode=mode, schedule=schedule, steps=steps)
        return now.with_extensions([*reached, entry])

    if choice is None:
        what = "; ".join(_changes(schedule, steps, planned))
        choices = {mode: extended(mode) for mode in get_args(ExtendMode)}
        suggestion: ExtendMode = "constant" if _is_mostly_warmup(choices["rewarm"], step) else "rewarm"
        raise ScheduleChangedError(_choice_message(before, choices, step, what), suggestion)
    return extended(choice)


def _schedules(run: ScheduledRun) -> list[tuple[str, ScheduleRecipe, int]]:
    return [(stage.name, stage.recipe.schedule, stage.steps) for stage in run.plan.stages]


def _in_force(stage: StagePlan, pending: Sequence[ExtensionRecipe]) -> tuple[ScheduleRecipe, int]:
    """Schedule and length of a stage when its last step was trained."""
    for entry in pending:
        if entry.stage == stage.name:
            return entry.schedule, entry.steps
    return stage.recipe.schedule, stage.steps


def _first_changed_step(before: Plan, now: Plan, stop: int) -> int | None:
    """The first step before ``stop`` with another learning-rate multiplier."""
    for one, other in zip(before.stages, now.stages, strict=False):
        if one.schedule == other.schedule:
            continue
        for step in range(one.first_step, min(one.end_step, stop)):
            if one.lr_multiplier(step) != other.lr_multiplier(step):
                return step
    return None


def _changes(schedule: ScheduleRecipe, steps: int, planned: StagePlan) -> Iterator[str]:
    if steps != planned.steps:
        yield f"{steps} steps, not {planned.steps}"
    for key, value in schedule:
        if value != (now := getattr(planned.recipe.schedule, key)):
            yield f"schedule.{key}={value}, not {now}"


def _choice_message(before: ScheduledRun, choices: dict[ExtendMode, ScheduledRun], step: int, changes: str) -> str:
    stage = choices["as-planned"].plan.stage_of(step)
    last, peak = stage.end_step - 1, stage.schedule.parts[-1].schedule.peak
    lines = [
        f"stage {stage.name} was trained with {changes}. Its learning rate was "
        f"{before.learning_rate(step - 1):.2e} at step {step - 1}, the last one trained. Choose how it continues:"
    ]
    for mode, run in choices.items():
        warmup = stage.schedule.parts[-1].schedule.warmup
        how = EXPLANATIONS[mode].format(
            peak=run.recipe.train.optimizer.peak_lr * peak, warmup=warmup, shape=stage.recipe.schedule.shape
        )
        if mode == "rewarm" and _is_mostly_warmup(run, step):
            how += f". Only {stage.end_step - step} steps are left: a shorter warm-up leaves more of them to decay"
        rates = f"{run.learning_rate(step):.2e} at step {step}, {run.learning_rate(last):.2e} at step {last}"
        lines.append(f"  --extend {mode:<12} {rates}: {how}")
    return "\n".join(lines)


def _is_mostly_warmup(rewarmed: ScheduledRun, step: int) -> bool:
    """Whether a second warm-up takes more than half of the steps that are left of a stage."""
    stage = rewarmed.plan.stage_of(step)
    return 2 * stage.schedule.parts[-1].schedule.warmup > stage.end_step - step


def _ended_message(before: ScheduledRun, now: ScheduledRun, step: int) -> str:
    name = before.plan.stage_of(step).name
    return (
        f"stage {name} has ended, so its schedule cannot change: step {step} was trained with a learning rate of "
        f"{before.learning_rate(step):.2e}, not {now.learning_rate(step):.2e}. Set its length and schedule as they "
        f"were, or train another run on the same tokens ({NEW_RUN_COMMAND})"
    )
