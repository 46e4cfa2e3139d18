"""Resuming a run: the state that is loaded, whether the recipe may continue it, and the learning rate from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.optim import Optimizer

from zero2all.base.console import say, warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.workspace import NEW_RUN_COMMAND
from zero2all.checkpoint import (
    CheckpointManager,
    DamagedStateError,
    RankGroup,
    RestorePoint,
    RunIdentity,
    TrainingState,
)
from zero2all.checkpoint.training_state import StageIdentity
from zero2all.optim.optimizer import apply_settings
from zero2all.parallel import ParallelModel
from zero2all.recipe import ExtendMode, OptimizerRecipe, Recipe
from zero2all.recipe.run_settings import default_settings, is_adjustable, is_stage_default
from zero2all.recipe.training import ONLY_STAGE
from zero2all.train.extension import ScheduleChangedError, ScheduledRun, continue_schedule
from zero2all.train.plan import Plan
from zero2all.train.run import Run
from zero2all.train.spike_detector import SpikeDetector


@dataclass(frozen=True)
class SettingChange:
    """A key of the recipe that does not have the value with which the run was trained."""

    key: str
    was: Any
    will_be: Any

    def __str__(self) -> str:
        return f"{self.key}={self.was}, not {self.will_be}"


def identity_changes(before: RunIdentity, now: RunIdentity) -> list[str]:
    """Every difference that no option allows, with the keys of the recipe; empty if the run can be resumed."""
    settings = [change for change in setting_changes(before.settings, now.settings) if not is_adjustable(change.key)]
    changes = list(map(str, settings))
    for pair in zip(before.stages, now.stages, strict=False):
        changes += _stage_changes(*pair, is_explained=bool(settings))
    if len(before.stages) != len(now.stages):
        changes.append(f"{len(before.stages)} stages begun, not {len(now.stages)} (train.stages)")
    if before.tokenizer != now.tokenizer:
        changes.append("a different tokenizer")
    changes += map(str, model_changes(before.model, now.model))
    if before.init != now.init:
        changes.append(f"train.init={before.init}, not {now.init}")
    return changes


def adjusted_settings(before: RunIdentity, now: RunIdentity) -> list[SettingChange]:
    """The keys with other values that ``--extend`` allows."""
    return [change for change in setting_changes(before.settings, now.settings) if is_adjustable(change.key)]


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[SettingChange]:
    """A key that the version of ``before`` did not have was trained with its default."""
    unset: dict[str, Any] = {key: {} for key in before if key.endswith(".options") and key not in now}  # of plugins
    for key, value in {**now, **unset}.items():
        was = before.get(key, default_settings().get(key))
        if was != value:
            yield SettingChange(key, was, value)


def model_changes(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "model") -> list[SettingChange]:
    """The keys of a section, by default of a model config, that differ."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        was, will_be = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(will_be, dict):
            changes += model_changes(was, will_be, f"{section}.{key}")
        elif was != will_be:
            changes.append(SettingChange(f"{section}.{key}", was, will_be))
    return changes


def stage_setting_changes(before: Mapping[str, Any], now: Mapping[str, Any], stage: str) -> list[SettingChange]:
    """The keys that decide the samples of a stage."""
    changes = []
    for name, value in now.items():
        if name in before and before[name] != value:
            is_default = stage == ONLY_STAGE and is_stage_default(name)
            key = f"train.{name}" if is_default else f"train.stages.{stage}.{name}"
            if isinstance(value, dict) and isinstance(before[name], dict) and name != "mixture":
                changes += model_changes(before[name], value, key)
            else:
                changes.append(SettingChange(key, before[name], value))
    return changes


def _stage_changes(before: StageIdentity, now: StageIdentity, *, is_explained: bool) -> Iterator[str]:
    """``is_explained`` if a key beside the stages, such as the seed, has changed the samples."""
    if (before.name, before.first_step) != (now.name, now.first_step):
        yield f"stage {before.name} at step {before.first_step}, not {now.name} at step {now.first_step}"
        return
    named = stage_setting_changes(before.settings, now.settings, now.name)
    yield from map(str, named)
    if named or is_explained:
        return
    if before.batch[0] != now.batch[0]:
        yield f"{before.batch[0]} samples in a batch of stage {now.name}, not {now.batch[0]} (train.batch_tokens)"
    elif before.batch != now.batch:
        yield f"a different train.batch_ramp in stage {now.name}"
    if before.samples != now.samples:
        keys = "seed, train.seq_len, train.mixture, or the token store"
        if before.settings:  # then none of these keys has changed
            keys = "the token store" + (", or the length with max_epochs" if now.settings["max_epochs"] else "")
        yield f"different samples in stage {now.name} ({keys})"
    if before.rope != now.rope:
        yield f"a different rope_theta or rope_scaling of stage {now.name}"


@dataclass(frozen=True)
class ResumedRun:
    """The newest valid state, and the recipe and plan with the extensions of the run."""

    restored: RestorePoint | None
    recipe: Recipe
    plan: Plan
    messages: tuple[str, ...] = ()
    """Lines about what changes with this start."""


def plan_resume(
    manager: CheckpointManager, run: Run, plan: Plan, identity: RunIdentity, ranks: RankGroup, extend: ExtendMode | None
) -> ResumedRun:
    """Find the newest valid state if there is one. A recipe that cannot continue it fails before anything is changed.

    ``extend`` is the choice for a begun stage whose schedule has changed, and allows other values of adjustable keys.
    """
    restored, decision = manager.find_restore_point(), manager.decision
    assert decision is not None
    if restored is None:
        if decision.rejected:
            warn(decision.reason)
        if extend is not None:
            say(f"--extend {extend} changes nothing: the run starts from scratch")
        return ResumedRun(None, run.recipe, plan)
    step = restored.step
    _check_identity(restored.state, identity, plan, restored.step, run)
    adjusted = adjusted_settings(restored.state, identity)
    if step > plan.total_steps:
        raise UsageError(f"the run in {run.directory} is at step {step} already, past the {plan.total_steps} asked for")
    planned = ScheduledRun(run.recipe, plan)
    before = _last_start(run, plan, step, ranks) if step else planned
    if isinstance(before, str):
        if extend in ("constant", "rewarm"):
            raise UsageError(f"--extend {extend} needs the learning rate of the last start: {before}")
        warn(f"the learning rate may differ from the last start's, which is unknown: {before}")
        before = planned
    try:
        resumed = continue_schedule(before, planned, step, extend) if step else planned
    except ScheduleChangedError as error:
        message = f"{_adjusted_message(adjusted, run)}\n{error}" if adjusted else str(error)
        raise ScheduleChangedError(message, error.suggestion) from None
    if step and extend is None and adjusted:
        raise UsageError(
            f"{_adjusted_message(adjusted, run)} To continue it with the new values, add --extend as-planned. "
            f"Otherwise train a different run on the same tokens ({NEW_RUN_COMMAND})"
        )
    if extend is not None and resumed.recipe.train.extensions == before.recipe.train.extensions and not adjusted:
        say(f"--extend {extend} changes nothing: the trained steps had this schedule and these settings")
    return ResumedRun(
        restored,
        resumed.recipe,
        resumed.plan,
        (
            f"resuming after step {step}: restored {decision.reason}",
            *_changed_rates(before, resumed, step),
            *_adjusted_lines(adjusted),
        ),
    )


def load_newest(manager: CheckpointManager, resumed: ResumedRun, plan_again: Callable[[], ResumedRun]) -> ResumedRun:
    """Load the state that ``plan_resume`` found, or start from scratch. A damaged one is given up for an older one."""
    while resumed.restored is not None:
        try:
            manager.load(resumed.restored)
        except DamagedStateError:
            resumed = plan_again()
            continue
        for line in resumed.messages:
            say(line)
        return resumed
    manager.begin_history(None)
    return resumed


def _check_identity(saved: RunIdentity, identity: RunIdentity, plan: Plan, step: int, run: Run) -> None:
    # Stages that have not begun may be changed.
    begun = replace(identity, stages=plan.identity(before=step))
    before = replace(saved, stages=[stage for stage in saved.stages if stage.first_step < step])
    if changes := identity_changes(before, begun):
        raise UsageError(
            f"the run in {run.directory} was trained with {'; '.join(changes)}. Set the recipe as it was, train a "
            f"different run on the same tokens ({NEW_RUN_COMMAND}; train.init={run.directory} starts it with these "
            "weights), or remove this directory"
        )


def _adjusted_message(adjusted: list[SettingChange], run: Run) -> str:
    return f"the run in {run.directory} was trained with {'; '.join(map(str, adjusted))}."


def _adjusted_lines(adjusted: list[SettingChange]) -> list[str]:
    """Peak learning rates have lines of their own."""
    rates = ("train.optimizer.lr", "train.optimizer.muon_lr")
    return [f"{change.key} is {change.will_be}, before {change.was}" for change in adjusted if change.key not in rates]


def _last_start(run: Run, plan: Plan, step: int, ranks: RankGroup) -> ScheduledRun | str:
    """What the last start planned, or why that is unknown. Rank 0 reads it for all."""
    path = run.directory / "recipe.yaml"

    def read() -> Recipe | str:
        try:
            return run.stored_recipe() or f"{run.directory} has no metadata"
        except (Z2aError, OSError) as error:
            return str(error)

    stored = ranks.on_rank0(read)
    if isinstance(stored, str):
        return stored
    try:
        before = ScheduledRun(stored, Plan(stored, plan.store))
        _peak_rates(before)
    except (Z2aError, ValueError) as error:  # of another token store, or with a value that a run has always set
        return f"{path} cannot be used ({error})"
    if step > before.plan.total_steps or plan.identity(before=step) != before.plan.identity(before=step):
        return f"{path} does not fit the state after step {step}"
    return before


def _changed_rates(before: ScheduledRun, now: ScheduledRun, step: int) -> list[str]:
    """A line for each peak learning rate that the recipe has changed."""
    lines = []
    for key, will_be in _peak_rates(now).items():
        was = _peak_rates(before)[key]
        if was != will_be and step < now.plan.total_steps:
            last = was * before.plan.stage_of(step - 1).lr_multiplier(step - 1)
            following = will_be * now.plan.stage_of(step).lr_multiplier(step)
            lines.append(
                f"train.optimizer.{key} is {will_be:g}, before {was:g}: "
                f"{last:.2e} at step {step - 1}, {following:.2e} at step {step}"
            )
    return lines


def _peak_rates(run: ScheduledRun) -> dict[str, float]:
    optimizer = run.recipe.train.optimizer
    return {key: optimizer.peak(key) for key in optimizer.plugin.rates}


def restore_state(
    state: TrainingState,
    model: ParallelModel,
    optimizers: list[Optimizer],
    options: OptimizerRecipe,
    guard: SpikeDetector,
) -> None:
    """Restore what a checkpoint holds beside the tensors; gradients of an unfinished step are dropped."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    apply_settings(optimizers, options)
    guard.load_state(state.guard)
    if model.loss_scaler is not None and state.loss_scale is not None:
        model.loss_scaler.load_state_dict(asdict(state.loss_scale))
