"""What every step of a run does, as closed forms of its number: stage, samples, batch size, learning rate.

Nothing here depends on the world size, so a run may resume on more or fewer devices without changing any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from zero2all.base.errors import UsageError
from zero2all.base.units import Duration
from zero2all.checkpoint.training_state import StageIdentity
from zero2all.optim.lr_schedule import CONSTANT, LRSchedule
from zero2all.recipe import ExtendMode, Recipe, ResolvedStage, RopeScaling, ScheduleRecipe
from zero2all.recipe.run_settings import stage_settings
from zero2all.tokens import EstimatedStore, PackedDataset, TokenStore

MAX_USEFUL_EPOCHS = 4  # from about here on, repeated text teaches less than new text (https://arxiv.org/abs/2305.16264)


@dataclass(frozen=True)
class SchedulePart:
    """A schedule that holds from a step of the stage on."""

    first_step: int
    origin: int
    """The step of the stage that is step 0 of the schedule."""
    schedule: LRSchedule


@dataclass(frozen=True)
class StageSchedule:
    """The learning rate of a stage: one schedule, or several one after another if a begun stage was extended.

    >>> schedule = StageSchedule.of(LRSchedule("cosine", 600, 20, 1.0, 0.1, 0.2))
    >>> longer = schedule.extended(600, "rewarm", LRSchedule("cosine", 1000, 20, 1.0, 0.1, 0.2))
    """

    steps: int
    parts: tuple[SchedulePart, ...]

    @classmethod
    def of(cls, schedule: LRSchedule) -> StageSchedule:
        return cls(schedule.steps, (SchedulePart(0, 0, schedule),))

    def extended(self, step: int, mode: ExtendMode, planned: LRSchedule) -> StageSchedule:
        """The same up to ``step``; from there on what ``mode`` makes of the schedule ``planned`` for the full stage."""
        origin, last = (0 if mode == "as-planned" else step), self.lr_multiplier(step - 1)
        if mode == "constant":
            planned = replace(planned, shape=CONSTANT, warmup=0, peak=last, min_lr_ratio=last)
        elif mode == "rewarm":
            planned = replace(planned, start=last)
        part = SchedulePart(step, origin, replace(planned, steps=planned.steps - origin))
        return StageSchedule(planned.steps, (*self.parts, part))

    def lr_multiplier(self, step: int) -> float:
        """Factor on the optimizer's learning rate at a step of the stage."""
        part = next(part for part in reversed(self.parts) if part.first_step <= step)
        return part.schedule.lr_multiplier(step - part.origin)

    @property
    def end_lr_multiplier(self) -> float:
        return self.lr_multiplier(self.steps - 1)


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run. Steps are counted from the start of the run, samples from the start of the stage."""

    recipe: ResolvedStage
    first_step: int
    steps: int
    dataset: PackedDataset
    schedule: StageSchedule
    ramp_steps: int

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def end_step(self) -> int:
        return self.first_step + self.steps

    @property
    def batch_size(self) -> int:
        """Samples per step, after any batch ramp."""
        return self.recipe.batch_tokens // self.recipe.seq_len

    @property
    def micro_batch_size(self) -> int | None:
        """Samples in one forward pass of a rank; None leaves it to the parallel layout."""
        return self.recipe.micro_batch_tokens and self.recipe.micro_batch_tokens // self.recipe.seq_len

    def lr_multiplier(self, step: int) -> float:
        """Factor on the optimizer's learning rate."""
        return self.schedule.lr_multiplier(step - self.first_step)

    def sample_range(self, step: int) -> tuple[int, int]:
        """The samples [start, stop) of a step."""
        return self._samples_before(step - self.first_step), self._samples_before(step - self.first_step + 1)

    def _samples_before(self, step: int) -> int:
        if step < len(self._ramp_offsets):
            return int(self._ramp_offsets[step])
        return int(self._ramp_offsets[-1]) + (step - len(self._ramp_offsets) + 1) * self.batch_size

    @cached_property
    def _ramp_offsets(self) -> np.ndarray[Any, Any]:
        return batch_ramp_offsets(self.recipe, self.ramp_steps)

    def tokens_before(self, step: int) -> int:
        return (
            self._samples_before(min(max(step, self.first_step), self.end_step) - self.first_step) * self.recipe.seq_len
        )

    def epochs_by_source(self) -> dict[str, float]:
        """Epochs of each source over the full stage."""
        return self.dataset.order.epochs_before(self.sample_range(self.end_step - 1)[1])

    def identity(self) -> StageIdentity:
        scaling = self.recipe.rope_scaling
        return StageIdentity(
            name=self.name,
            first_step=self.first_step,
            samples=self.dataset.fingerprint,
            batch=[self.batch_size, *map(int, self._ramp_offsets[:2]), self.ramp_steps],
            rope=[self.recipe.rope_theta, None if scaling is None else scaling.model_dump(mode="json")],
            settings=stage_settings(self.recipe),
        )


class Plan:
    """
    >>> plan = Plan(recipe, TokenStore(recipe.tokens_dir, "train"))
    >>> stage = plan.stage_of(1000)
    >>> stage.sample_range(1000), stage.lr_multiplier(1000)
    """

    def __init__(self, recipe: Recipe, store: TokenStore | EstimatedStore) -> None:
        self.model, self.store = recipe.model, store
        self.compares_completions = recipe.train.objective.compares_completions
        self.stages: list[StagePlan] = []
        first, previous_lr_multiplier = 0, 1.0
        for stage in recipe.train.resolved_stages():
            datasets = partial(
                PackedDataset,
                store,
                stage.seq_len,
                recipe.seed,
                stage.name,
                conversations=recipe.train.conversations,
                document_mask=recipe.train.document_mask,
            )
            planned = _plan_stage(stage, datasets, first, previous_lr_multiplier)
            self.stages.append(planned)
            first, previous_lr_multiplier = planned.end_step, planned.schedule.end_lr_multiplier
        self.total_steps = first

    def stage_of(self, step: int) -> StagePlan:
        """The stage of a step; past the end, the last one."""
        return next((stage for stage in self.stages if step < stage.end_step), self.stages[-1])

    @property
    def sources(self) -> list[str]:
        return sorted({name for stage in self.stages for name in stage.dataset.order.names})

    def rope(self, stage: StagePlan) -> tuple[float, RopeScaling | None]:
        """RoPE theta and scaling: the model's, until a stage overrides them."""
        theta, scaling = self.model.rope_theta, self.model.rope_scaling
        for earlier in self.stages[: self.stages.index(stage) + 1]:
            theta = earlier.recipe.rope_theta or theta
            scaling = earlier.recipe.rope_scaling or scaling
        return theta, scaling

    def tokens_before(self, step: int) -> int:
        return sum(stage.tokens_before(step) for stage in self.stages)

    def is_due(self, every: Duration | None, done: int) -> bool:
        """Whether an action with this interval is due after ``done`` steps."""
        if every is None:
            return False
        stage = self.stage_of(done - 1)
        epoch = stage.dataset.samples_per_epoch * stage.recipe.seq_len
        return done % max(1, every.in_steps(stage.recipe.batch_tokens, epoch)) == 0

    def epochs_by_source(self) -> dict[str, float]:
        """Epochs of each source over the full run."""
        epochs = dict.fromkeys(self.sources, 0.0)
        for stage in self.stages:
            for name, count in stage.epochs_by_source().items():
                epochs[name] += count
        return epochs

    def identity(self, before: int | None = None) -> list[StageIdentity]:
        """The stages, or only those that begin before a step: later ones may still be changed."""
        return [stage.identity() for stage in self.stages if before is None or stage.first_step < max(1, before)]


def _plan_stage(
    stage: ResolvedStage, datasets: Callable[..., PackedDataset], first_step: int, previous_lr_multiplier: float
) -> StagePlan:
    """``datasets`` makes the dataset of a mixture."""
    dataset = datasets(mixture=stage.mixture)
    epoch = dataset.samples_per_epoch * stage.seq_len
    ramp_steps = stage.batch_ramp.over.in_steps(stage.batch_tokens, epoch) if stage.batch_ramp else 0
    steps = _count_steps(stage, epoch, ramp_steps)
    if steps < 1:
        raise UsageError(f"{stage.duration} is less than one step of {stage.batch_tokens} tokens")
    schedule = _plan_schedule(stage, steps, epoch, first_step, previous_lr_multiplier)
    plan = StagePlan(stage, first_step, steps, dataset, schedule, ramp_steps)
    if stage.max_epochs is None or not stage.mixture:
        return plan
    sequences = dataset.sequences_per_source
    weights = cap_mixture_weights(stage.mixture, sequences, plan.sample_range(plan.end_step - 1)[1], stage.max_epochs)
    return StagePlan(stage, first_step, steps, datasets(mixture=weights), schedule, ramp_steps)


def _plan_schedule(
    stage: ResolvedStage, steps: int, tokens_per_epoch: int, first_step: int, previous_lr_multiplier: float
) -> StageSchedule:
    """The stage's schedule, after the schedules before each extension. One past the end of the stage is void."""

    def resolve(recipe: ScheduleRecipe, length: int) -> LRSchedule:
        warmup = recipe.warmup.in_steps(stage.batch_tokens, tokens_per_epoch)
        return LRSchedule.from_recipe(recipe, length, warmup, previous_lr_multiplier)

    extensions = [extension for extension in stage.extensions if extension.step < first_step + steps]
    if extensions and extensions[0].step <= first_step:
        raise UsageError(
            f"train.extensions: stage {stage.name} begins at step {first_step}, so it cannot be extended at "
            f"step {extensions[0].step}"
        )
    schedules = [resolve(extension.schedule, extension.steps) for extension in extensions]
    schedules.append(resolve(stage.schedule, steps))
    planned = StageSchedule.of(schedules[0])
    for extension, schedule in zip(extensions, schedules[1:], strict=True):
        planned = planned.extended(extension.step - first_step, extension.mode, schedule)
    return planned


def _count_steps(stage: ResolvedStage, tokens_per_epoch: int, ramp_steps: int) -> int:
    """Steps that fit into the stage's duration; during a batch ramp more steps fit into the same tokens."""
    if stage.duration.unit == "steps":
        return int(stage.duration.value)
    tokens = stage.duration.in_steps(1, tokens_per_epoch)
    ramp_tokens = batch_ramp_offsets(stage, ramp_steps) * stage.seq_len
    if tokens < ramp_tokens[-1]:
        return int(np.searchsorted(ramp_tokens, tokens, side="right")) - 1
    remaining = Duration(tokens - int(ramp_tokens[-1]), "tokens")
    return len(ramp_tokens) - 1 + remaining.in_steps(stage.batch_tokens, tokens_per_epoch)


def batch_ramp_offsets(stage: ResolvedStage, ramp_steps: int) -> np.ndarray[Any, Any]:
    """Samples before each step of the ramp, and before the first step after it."""
    full = stage.batch_tokens // stage.seq_len
    start = stage.batch_ramp.start // stage.seq_len if stage.batch_ramp else full
    sizes = start + (full - start) * np.arange(ramp_steps, dtype=np.int64) // max(1, ramp_steps)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def cap_mixture_weights(
    weights: dict[str, float], sequences: dict[str, int], total_samples: int, max_epochs: float
) -> dict[str, float]:
    """Weights with which no source exceeds ``max_epochs`` of its sequences; the other sources share what it leaves."""
    limit = {name: max_epochs * sequences[name] / total_samples for name in weights}
    if sum(limit.values()) < 1:
        most = ", ".join(f"{name} {max_epochs * sequences[name]:.0f}" for name in weights)
        raise UsageError(
            f"the stage takes {total_samples} samples, but max_epochs={max_epochs:g} allows no more than {most}: "
            "use a shorter stage, more text, or a higher max_epochs"
        )
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    capped: dict[str, float] = {}
    while over := [name for name in shares if shares[name] > limit[name]]:
        capped |= {name: limit[name] for name in over}
        free = {name: weights[name] for name in shares if name not in over}
        left = 1 - sum(capped.values())
        shares = {name: left * weight / sum(free.values()) for name, weight in free.items()}
    return capped | shares
