"""An optimizer, a learning-rate schedule, an objective, a reward function and a callback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zero2all.base.plugins import LAYOUTS, bind, register
from zero2all.optim.lr_schedule import LRSchedule
from zero2all.parallel import ParallelModel
from zero2all.recipe import OptimizerRecipe
from zero2all.recipe.objective_plugin import ObjectivePlugin
from zero2all.recipe.optimizer_plugin import LearningRateLaw, OptimizerParameters, OptimizerPlugin
from zero2all.train.components import Component, FinishedStep
from zero2all.train.data_loader import Batch
from zero2all.train.job import TrainingJob
from zero2all.train.objectives.build import ObjectiveInputs
from zero2all.train.objectives.step import SourceLosses, StepLoss, TokenObjective


class Signum(Optimizer):
    """The sign of the momentum (https://arxiv.org/abs/1802.04434). Its state has the shape of the parameter."""

    def __init__(self, groups: Any, beta: float) -> None:
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])


@register("optimizer", "signum", supports=("sharded_parameters", "tensor_parallel", "checkpoint_state"))
class SignumPlugin(OptimizerPlugin):
    """Momentum whose sign is the update."""

    def __init__(self, *, beta: float = 0.9) -> None:
        self.beta = beta

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        return [Signum(parameters.groups(), self.beta)]

    def learning_rate(self, key: str, law: LearningRateLaw) -> tuple[float, str]:
        return 0.1 * law.adamw, f"a tenth of AdamW's; {law.source}"

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        return 4 * math.prod(shape)


@register("schedule", "halving")
def halving(schedule: LRSchedule, step: int, *, times: int = 3) -> float:
    """Halve the rate several times, at equal intervals."""
    return schedule.peak / 2 ** int(schedule.done(step, schedule.warmup) * times)


class Capped(TokenObjective):
    """The loss of each token, up to a maximum: one wrong token cannot dominate a step."""

    def __init__(self, sources: SourceLosses, cap: float) -> None:
        super().__init__(sources)
        self.cap = cap

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        return StepLoss(super().begin(model, batch).divisor, lambda losses, rows: losses.clamp(max=self.cap).sum())


@register("objective", "capped", supports=LAYOUTS)
class CappedPlugin(ObjectivePlugin):
    """Pretraining with a maximum for the loss of a token."""

    weighs_tokens = True

    def __init__(self, *, cap: float = 5.0) -> None:
        self.cap = cap

    def build(self, inputs: ObjectiveInputs) -> Capped:
        return Capped(inputs.source_losses(), self.cap)


@register("reward", "digits")
def digits(prompt: str, answer: str, reference: str, *, points: float = 1.0) -> float:
    """Give points for the share of digits in an answer."""
    return points * sum(map(str.isdigit, answer)) / max(1, len(answer))


@register("callback", "text-reward", supports=LAYOUTS)
class TextReward(Component):
    """Record what the reward functions of the recipe give for the first row of a batch."""

    def __init__(self, job: TrainingJob, *, every: int = 2) -> None:
        self.job, self.every = job, every
        self.rewards = [bind("reward", spec) for spec in job.recipe.train.objective.grpo.rewards]

    def after_step(self, step: FinishedStep) -> None:
        if step.done % self.every == 0:
            text = self.job.tokenizer.decode(step.batch.inputs[0].tolist())
            total = sum(reward("", text, "") for reward in self.rewards)
            self.job.recorder.record.step(step.batch.step, **{"reward/text": total})
