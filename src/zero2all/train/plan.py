"""What every step of a run will do, as closed forms of its number: stage, samples, batch size, learning rate.

Nothing here knows how many devices there are, so a run may go on with more or fewer of them and change none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from zero2all.errors import UsageError
from zero2all.recipe import Recipe, RopeScaling, Stage
from zero2all.tokens import Samples, TokenStore
from zero2all.train.schedule import Schedule
from zero2all.units import Duration

MANY_PASSES = 4  # from about here on, repeated text teaches less than new text (https://arxiv.org/abs/2305.16264)


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run. Its steps are counted from the run's beginning, its samples from its own."""

    stage: Stage
    first_step: int
    steps: int
    samples: Samples
    schedule: Schedule
    ramp_steps: int

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def end(self) -> int:
        return self.first_step + self.steps

    @property
    def batch_samples(self) -> int:
        """Samples of a step once the batch is whole."""
        return self.stage.batch_tokens // self.stage.seq_len

    @property
    def micro_samples(self) -> int | None:
        """Samples in one forward pass of a rank; None leaves it to the layout."""
        return self.stage.micro_batch_tokens and self.stage.micro_batch_tokens // self.stage.seq_len

    def share(self, step: int) -> float:
        """Share of the optimizer's learning rate."""
        return self.schedule.share(step - self.first_step)

    def batch(self, step: int) -> tuple[int, int]:
        """The samples [start, stop) of a step."""
        return self._samples_before(step - self.first_step), self._samples_before(step - self.first_step + 1)

    def _samples_before(self, step: int) -> int:
        if step < len(self._ramp):
            return int(self._ramp[step])
        return int(self._ramp[-1]) + (step - len(self._ramp) + 1) * self.batch_samples

    @cached_property
    def _ramp(self) -> np.ndarray[Any, Any]:
        return ramp_starts(self.stage, self.ramp_steps)

    def tokens_before(self, step: int) -> int:
        return self._samples_before(min(max(step, self.first_step), self.end) - self.first_step) * self.stage.seq_len

    def passes(self) -> dict[str, float]:
        """How often each source is gone through in the whole stage."""
        return self.samples.order.epochs_at(self.batch(self.end - 1)[1])

    def describe(self) -> dict[str, Any]:
        """All that decides which samples a step takes, and how their positions are turned."""
        scaling = self.stage.rope_scaling
        return {
            "name": self.name,
            "first_step": self.first_step,
            "samples": self.samples.fingerprint,
            "batch": [self.batch_samples, *map(int, self._ramp[:2]), self.ramp_steps],
            "rope": [self.stage.rope_theta, scaling and scaling.model_dump(mode="json")],
        }


class Plan:
    """
    >>> plan = Plan(recipe, TokenStore(recipe.tokens_dir, "train"))
    >>> stage = plan.at(1000)
    >>> stage.batch(1000), stage.share(1000)
    """

    def __init__(self, recipe: Recipe, store: TokenStore) -> None:
        self.model = recipe.model
        self.stages: list[StagePlan] = []
        first, previous = 0, 1.0
        for stage in recipe.train.resolved_stages():
            planned = _plan_stage(stage, store, recipe.seed, first, previous)
            self.stages.append(planned)
            first, previous = planned.end, planned.schedule.end
        self.total = first

    def at(self, step: int) -> StagePlan:
        """The stage of a step; past the end, the last one."""
        return next((stage for stage in self.stages if step < stage.end), self.stages[-1])

    @property
    def sources(self) -> list[str]:
        return sorted({name for stage in self.stages for name in stage.samples.order.names})

    def rope(self, stage: StagePlan) -> tuple[float, RopeScaling | None]:
        """Base and scaling of rotary positions: the model's, until a stage says otherwise."""
        theta, scaling = self.model.rope_theta, self.model.rope_scaling
        for earlier in self.stages[: self.stages.index(stage) + 1]:
            theta = earlier.stage.rope_theta or theta
            scaling = earlier.stage.rope_scaling or scaling
        return theta, scaling

    def tokens_before(self, step: int) -> int:
        return sum(stage.tokens_before(step) for stage in self.stages)

    def is_due(self, every: Duration | None, done: int) -> bool:
        """Whether something that happens every so often happens after ``done`` steps."""
        if every is None:
            return False
        stage = self.at(done - 1)
        epoch = stage.samples.per_epoch * stage.stage.seq_len
        return done % max(1, every.in_steps(stage.stage.batch_tokens, epoch)) == 0

    def passes(self) -> dict[str, float]:
        """How often each source is gone through in the run."""
        passes = dict.fromkeys(self.sources, 0.0)
        for stage in self.stages:
            for name, count in stage.passes().items():
                passes[name] += count
        return passes

    def describe(self, before: int | None = None) -> list[dict[str, Any]]:
        """The stages, or those of them that begin before a step: what is still to come may be planned anew."""
        return [stage.describe() for stage in self.stages if before is None or stage.first_step < max(1, before)]


def _plan_stage(stage: Stage, store: TokenStore, seed: int, first_step: int, previous: float) -> StagePlan:
    everything = Samples(store, stage.seq_len, seed, stage.name, stage.mixture)
    epoch = everything.per_epoch * stage.seq_len
    ramp_steps = stage.batch_ramp.over.in_steps(stage.batch_tokens, epoch) if stage.batch_ramp else 0
    steps = _whole_steps(stage, epoch, ramp_steps)
    if steps < 1:
        raise UsageError(f"{stage.duration} is less than one step of {stage.batch_tokens} tokens")
    warmup = stage.schedule.warmup.in_steps(stage.batch_tokens, epoch)
    schedule = Schedule.of(stage.schedule, steps, warmup, previous)
    plan = StagePlan(stage, first_step, steps, everything, schedule, ramp_steps)
    if stage.max_epochs is None or not stage.mixture:
        return plan
    rows = everything.rows_of_sources
    weights = capped_weights(stage.mixture, rows, plan.batch(plan.end - 1)[1], stage.max_epochs)
    capped = Samples(store, stage.seq_len, seed, stage.name, weights)
    return StagePlan(stage, first_step, steps, capped, schedule, ramp_steps)


def _whole_steps(stage: Stage, tokens_per_epoch: int, ramp_steps: int) -> int:
    """Steps that fit into the stage's length; while the batch is growing more of them fit into the same tokens."""
    if stage.duration.unit == "steps":
        return int(stage.duration.value)
    tokens = stage.duration.in_steps(1, tokens_per_epoch)
    grown = ramp_starts(stage, ramp_steps) * stage.seq_len
    if tokens < grown[-1]:
        return int(np.searchsorted(grown, tokens, side="right")) - 1
    left = Duration(tokens - int(grown[-1]), "tokens")
    return len(grown) - 1 + left.in_steps(stage.batch_tokens, tokens_per_epoch)


def ramp_starts(stage: Stage, ramp_steps: int) -> np.ndarray[Any, Any]:
    """Samples before each step of the ramp, and before the first step after it."""
    full = stage.batch_tokens // stage.seq_len
    start = stage.batch_ramp.start // stage.seq_len if stage.batch_ramp else full
    sizes = start + (full - start) * np.arange(ramp_steps, dtype=np.int64) // max(1, ramp_steps)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def capped_weights(
    weights: dict[str, float], rows: dict[str, int], samples: int, max_epochs: float
) -> dict[str, float]:
    """Weights with which no source gives more than ``max_epochs`` of its rows; the rest share what it leaves."""
    limit = {name: max_epochs * rows[name] / samples for name in weights}
    if sum(limit.values()) < 1:
        most = ", ".join(f"{name} {max_epochs * rows[name]:.0f}" for name in weights)
        raise UsageError(
            f"the stage takes {samples} samples, but max_epochs={max_epochs:g} allows no more than {most}: "
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
