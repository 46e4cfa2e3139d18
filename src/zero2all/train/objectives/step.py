"""What a step minimizes, and what is measured of it: one class for each family of objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zero2all.base.machine.devices import copy_to_device, fp64_device
from zero2all.model.ops.cross_entropy import SoftTargets
from zero2all.parallel import ParallelModel
from zero2all.parallel.pipeline_parallel import SequenceObjective
from zero2all.recipe.objective import DPORecipe, KTORecipe
from zero2all.train.data_loader import Batch
from zero2all.train.objectives.completions import CompletionSources, score_completions
from zero2all.train.objectives.preference import (
    KTO_METRICS,
    PAIR_METRICS,
    CompletionBatch,
    kto_losses,
    kto_metrics,
    preference_losses,
    preference_metrics,
)

LOSS, TARGETS, TEXT_LOSS, BYTES = range(4)  # columns: nats and targets of all tokens, nats and bytes of text alone
Rows = Sequence[Sequence[float]]
"""Sums over all ranks."""


class SourceLosses:
    """Losses by source, in the same all-reduce that the loss needs anyway.

    >>> source_losses = SourceLosses(["code", "en", "zh"], tokenizer.token_byte_lengths, device)
    >>> *by_source, empty = source_losses.sums(losses, targets, batch.sources).tolist()  # after an all-reduce
    >>> source_losses.metrics(by_source)
    {'loss/en': 2.31, 'bpb/en': 1.07, ...}
    """

    def __init__(self, names: Sequence[str], token_byte_lengths: Sequence[int], device: torch.device) -> None:
        self.names = list(names)
        self._source_index = {name: number for number, name in enumerate(self.names)}
        # One more entry at the end, for ignored targets (index -1).
        self._bytes = torch.tensor([*token_byte_lengths, 0], dtype=torch.float64, device=fp64_device(device))

    def sums(self, losses_NS: Tensor, targets_NS: Tensor, sources: Sequence[str]) -> Tensor:
        """[sources + 1, 4] in fp64, of losses and targets on the same device. A row without a source is padding.

        The last row is zero: flags that ranks exchange go there, so that they need no all-reduce of their own.
        """
        losses, targets = (tensor.to(fp64_device(tensor.device)) for tensor in (losses_NS, targets_NS))
        padding = len(self.names) + 1  # a row of sums that is dropped
        numbers = torch.tensor([self._source_index.get(source, padding) for source in sources], dtype=torch.int64)
        losses, numbers = losses.double(), copy_to_device(numbers, losses.device)
        sizes = self._bytes[targets.clamp(min=-1)]
        row_sums = torch.stack(
            [losses.sum(1), (targets >= 0).sum(1).double(), (losses * (sizes > 0)).sum(1), sizes.sum(1)], dim=1
        )
        sums = torch.zeros(padding + 1, 4, dtype=torch.float64, device=losses.device)
        return sums.index_add_(0, numbers, row_sums)[:-1]

    def metrics(self, sums: Sequence[Sequence[float]]) -> dict[str, float]:
        """Loss and bits per byte of every source that was in the batch."""
        metrics = {}
        for name, row in zip(self.names, sums, strict=True):
            if row[TARGETS]:
                metrics[f"loss/{name}"] = row[LOSS] / row[TARGETS]
            if row[BYTES]:
                metrics[f"bpb/{name}"] = row[TEXT_LOSS] / math.log(2) / row[BYTES]
        return metrics


@dataclass(frozen=True)
class StepLoss:
    """How the losses of a batch become the value whose gradient is computed: its sum, divided by ``divisor``."""

    divisor: float
    objective: SequenceObjective | None = None
    """None: the losses themselves."""
    batch: Batch | None = None
    """What is trained on in place of the batch that was read."""
    soft: SoftTargets | None = None
    """What a teacher expects."""


class StepObjective(Protocol):
    """Called once per step, in this order, by every rank."""

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        """Before the forward pass; may run the model without a gradient."""

    def sums(self, model: ParallelModel, losses: Tensor, batch: Batch) -> Tensor:
        """[rows + 1, columns] in fp64, of this rank's losses; the last row is zero: flags go there."""

    def loss(self, rows: Rows, batch: Batch) -> float:
        """The value of the step."""

    def metrics(self, rows: Rows) -> dict[str, float]: ...

    def idle_reason(self, batch: Batch, metrics: Mapping[str, float]) -> str | None:
        """Why no token of the step is trained on; None if some are."""
        return why_idle(batch)

    def validate(self, model: ParallelModel) -> dict[str, float]:
        """Metrics of its own on the validation set."""
        return {}


class TokenObjective(StepObjective):
    """Pretraining and supervised fine-tuning: the mean loss of all targets."""

    def __init__(self, source_losses: SourceLosses) -> None:
        self._source_losses = source_losses

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        # Divided by the valid targets of the global batch, so that gradients are summed over micro-batches and ranks,
        # and each target has the same weight.
        return StepLoss(max(1, batch.global_valid_tokens))

    def sums(self, model: ParallelModel, losses: Tensor, batch: Batch) -> Tensor:
        return self._source_losses.sums(losses, model.local_targets(batch.device_targets), batch.sources)

    def loss(self, rows: Rows, batch: Batch) -> float:
        return sum(row[LOSS] for row in rows) / max(1, batch.global_valid_tokens)

    def metrics(self, rows: Rows) -> dict[str, float]:
        return self._source_losses.metrics(rows)


class PreferenceObjective(StepObjective):
    """Preference pairs: see ``DPORecipe``. The value of a step is the mean over pairs, plus the SFT term."""

    def __init__(self, recipe: DPORecipe, sources: CompletionSources) -> None:
        self._recipe, self._sources = recipe, sources
        self._completions: CompletionBatch | None = None

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        assert batch.completions is not None
        completions = self._completions = self._sources.completion_batch(batch, model.mesh.device)
        counts = batch.completions.counts
        nll_weight = self._recipe.nll_weight * counts.examples / max(1, counts.desirable_targets)

        def objective(losses_BS: Tensor, rows: slice | Tensor) -> Tensor:
            own = completions.rows(rows)
            logps_BQ = own.logps(losses_BS)
            pairs = preference_losses(logps_BQ, own, self._recipe).sum()
            return pairs - nll_weight * logps_BQ[:, ::2].sum() if nll_weight else pairs

        return StepLoss(counts.examples, objective)

    def sums(self, model: ParallelModel, losses: Tensor, batch: Batch) -> Tensor:
        assert self._completions is not None
        return with_flags(preference_metrics(self._completions.logps(losses), self._completions, self._recipe))

    def loss(self, rows: Rows, batch: Batch) -> float:
        assert batch.completions is not None
        sums = dict(zip(PAIR_METRICS, (row[0] for row in rows), strict=True))
        nll = -sums["logps/chosen"] / max(1, batch.completions.counts.desirable_targets)
        return sums["loss"] / batch.completions.counts.examples + self._recipe.nll_weight * nll

    def metrics(self, rows: Rows) -> dict[str, float]:
        sums = dict(zip(PAIR_METRICS, (row[0] for row in rows), strict=True))
        return {name: sums[name] / sums["pairs"] for name in PAIR_METRICS[2:]}

    def validate(self, model: ParallelModel) -> dict[str, float]:
        found = self._sources.validation_completions(model)
        if found is None:
            return {}
        sums = preference_metrics(*found, self._recipe).tolist()
        return {name: value / sums[0] for name, value in zip(PAIR_METRICS[1:], sums[1:], strict=True)}


class KTOObjective(StepObjective):
    """Completions with labels: see ``KTORecipe``. The value of a step is the mean over completions."""

    def __init__(self, recipe: KTORecipe, sources: CompletionSources) -> None:
        self._recipe, self._sources = recipe, sources
        self._completions: CompletionBatch | None = None
        self._divergence = 0.0

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        assert batch.completions is not None
        completions = self._completions = self._sources.completion_batch(batch, model.mesh.device)
        self._divergence = divergence = self._estimate_divergence(model, batch)

        def objective(losses_BS: Tensor, rows: slice | Tensor) -> Tensor:
            own = completions.rows(rows)
            return kto_losses(own.logps(losses_BS), own, divergence, self._recipe)

        return StepLoss(batch.completions.counts.examples, objective)

    def _estimate_divergence(self, model: ParallelModel, batch: Batch) -> float:
        """The mean log-ratio of completions to other prompts, over the global batch; at least 0."""
        ratios = []
        documents = batch.stage.dataset.completion_documents(*batch.sample_range)
        for source, pairs in self._sources.mismatched.items():
            numbers = np.array([number for name, number in documents if name == source], dtype=np.int64)
            fitting = numbers[pairs.lengths[numbers] <= pairs.seq_len + 1]
            scores = score_completions(
                model,
                pairs.lengths[fitting],
                lambda n, own=fitting, pairs=pairs: pairs.read(int(own[n])),  # type: ignore[misc]
                pairs.seq_len,
            )
            reference = self._sources.reference_of("mismatched", source)
            assert reference is not None
            ratios.append(scores - reference[fitting])
        both = np.concatenate(ratios)
        return max(0.0, float(both.mean())) if len(both) else 0.0

    def sums(self, model: ParallelModel, losses: Tensor, batch: Batch) -> Tensor:
        assert self._completions is not None
        return with_flags(
            kto_metrics(self._completions.logps(losses), self._completions, self._divergence, self._recipe)
        )

    def loss(self, rows: Rows, batch: Batch) -> float:
        assert batch.completions is not None
        return rows[1][0] / batch.completions.counts.examples

    def metrics(self, rows: Rows) -> dict[str, float]:
        return _kto_means([row[0] for row in rows]) | {"kl": self._divergence}

    def validate(self, model: ParallelModel) -> dict[str, float]:
        found = self._sources.validation_completions(model)
        return {} if found is None else _kto_means(kto_metrics(*found, self._divergence, self._recipe).tolist())


def _kto_means(sums: Sequence[float]) -> dict[str, float]:
    named = dict(zip(KTO_METRICS, sums, strict=True))
    means = {
        f"{metric}/{side}": named[f"{metric}/{side}"] / named[side]
        for side in ("chosen", "rejected")
        for metric in ("rewards", "logps")
        if named[side]
    }
    if named["chosen"] and named["rejected"]:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def with_flags(sums: Tensor) -> Tensor:
    """A column of sums, and an empty row after it."""
    return torch.nn.functional.pad(sums.to(fp64_device(sums.device)).double(), (0, 1))[:, None]


def why_idle(batch: Batch) -> str | None:
    """Why no token of a batch is trained on; None if some are."""
    if batch.completions is not None:
        return "its batch has no completions to compare" if batch.completions.counts.examples == 0 else None
    if batch.global_valid_tokens > 0:
        return None
    return (
        "no token of its batch is a target: 'z2a tokens inspect' shows which are; completions longer than seq_len "
        "are cut before they start"
    )
