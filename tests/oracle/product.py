"""A step of the product in one cell of the table: the trainer runs as it does for a user, and a spy keeps its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.train import TrainerHooks
from zero2all.train.data_loader import Batch
from zero2all.train.objectives.step import Rows, StepLoss, StepObjective
from zero2all.train.trainer import Trainer

Weights = dict[str, Tensor]
"""By the names of the product."""


@dataclass
class ObservedStep:
    """The last step of a run, before its update: the same on all ranks, but for weights and gradients of a pipeline."""

    tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    """int64 [rows, seq_len + 1]: the last one is a target only, and 0 if the row has none there."""
    is_target: Tensor = field(default_factory=lambda: torch.empty(0))
    """bool [rows, seq_len + 1]"""
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    """[rows, seq_len + 1], of each target."""
    weights: Weights = field(default_factory=dict)
    gradients: Weights = field(default_factory=dict)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class Spy:
    """Passes every call on to the objective of the run and keeps what it sees."""

    def __init__(self, objective: StepObjective, observed: ObservedStep) -> None:
        self._objective, self._observed = objective, observed

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        return self._objective.begin(model, batch)

    def sums(self, model: ParallelModel, losses: Tensor, batch: Batch) -> Tensor:
        pad = torch.nn.functional.pad
        ignored = batch.targets < 0
        last = batch.targets[:, -1:].masked_fill(ignored[:, -1:], 0)
        self._observed.tokens = torch.cat([batch.inputs, last], dim=1)
        self._observed.is_target = pad(~ignored, (1, 0))
        self._observed.losses = pad(model.all_reduce_sum(losses.detach().double()), (1, 0))
        return self._objective.sums(model, losses, batch)

    def loss(self, rows: Rows, batch: Batch) -> float:
        self._observed.loss = self._objective.loss(rows, batch)
        return self._observed.loss

    def idle_reason(self, batch: Batch, metrics: Mapping[str, float]) -> str | None:
        return self._objective.idle_reason(batch, metrics)

    def metrics(self, rows: Rows) -> dict[str, float]:
        self._observed.metrics = self._objective.metrics(rows)
        return self._observed.metrics

    def validate(self, model: ParallelModel) -> dict[str, float]:
        return self._objective.validate(model)


def observe(recipe: Recipe) -> ObservedStep:
    """Train a recipe on this rank; its last step."""
    observed = ObservedStep()

    def keep(model: ParallelModel) -> None:
        parameters = dict(model.model.named_parameters())
        observed.weights = {name: _full(parameter) for name, parameter in parameters.items()}
        observed.gradients = {name: _full(p.grad) for name, p in parameters.items() if p.grad is not None}

    with redirect_stderr(StringIO()), Trainer(recipe, TrainerHooks(on_gradients=keep)) as trainer:
        trainer.step.objective = Spy(trainer.step.objective, observed)
        trainer.train()
    return observed


def observe_all(recipes: Sequence[Recipe]) -> Iterator[ObservedStep]:
    for recipe in recipes:
        yield observe(recipe)


def merge(ranks: Sequence[ObservedStep]) -> ObservedStep:
    """What all ranks saw together: a rank of a pipeline has the weights of its own stages."""
    first = ranks[0]
    for other in ranks[1:]:
        first.weights |= other.weights
        first.gradients |= other.gradients
    return first


def _full(tensor: Tensor) -> Tensor:
    whole: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    copied: Tensor = whole.detach().clone()
    return copied
