"""Preference optimization: with preference pairs (DPO, IPO, hinge, robust DPO, SimPO, ORPO), or with a label for each
completion (KTO, https://arxiv.org/abs/2402.01306).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.recipe.objective import DPORecipe, KTORecipe

PAIR_METRICS = (
    "pairs", "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected",
)  # fmt: skip
"""What ``preference_metrics`` sums up."""
KTO_METRICS = (
    "answers", "loss", "chosen", "rewards/chosen", "logps/chosen", "rejected", "rewards/rejected", "logps/rejected",
)  # fmt: skip
"""What ``kto_metrics`` sums up."""


@dataclass(frozen=True)
class CompletionBatch:
    """The completions of some rows. Q is the largest number of completions in a row."""

    segments_BS: Tensor
    """1 + the number of the completion that a target belongs to; 0 where there is no target."""
    lengths_BQ: Tensor
    """Targets of each completion; 0 where a row has fewer completions."""
    desirable_BQ: Tensor
    """Whether a completion is the chosen one of a pair, or its label."""
    reference_BQ: Tensor
    """Log-probability by the reference model; 0 without one."""

    def rows(self, rows: slice | Tensor) -> CompletionBatch:
        return CompletionBatch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device) -> CompletionBatch:
        return CompletionBatch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))

    @property
    def present_BQ(self) -> Tensor:
        return self.lengths_BQ > 0

    def logps(self, losses_BS: Tensor) -> Tensor:
        """Log-probabilities of the completions [B, Q], from the loss of each token."""
        sums = losses_BS.new_zeros(len(losses_BS), self.lengths_BQ.shape[1] + 1)
        return -sums.scatter_add(1, self.segments_BS, losses_BS)[:, 1:]


def preference_losses(logps_BQ: Tensor, completions: CompletionBatch, recipe: DPORecipe) -> Tensor:
    """The loss of each pair [B, P], zero where a row has fewer pairs. Completions are chosen, rejected, chosen, ..."""
    margin = _difference(_rewards(logps_BQ, completions, recipe))
    if recipe.loss == "ipo":
        pairs = (margin / recipe.beta - 1 / (2 * recipe.beta)).square()
    elif recipe.loss == "hinge":
        pairs = torch.relu(1 - margin)
    elif recipe.loss == "robust":
        wrong = recipe.label_smoothing
        pairs = (wrong * F.logsigmoid(-margin) - (1 - wrong) * F.logsigmoid(margin)) / (1 - 2 * wrong)
    elif recipe.loss == "simpo":
        pairs = -F.logsigmoid(margin - recipe.margin)
    elif recipe.loss == "orpo":
        means = torch.where(completions.present_BQ, logps_BQ / completions.lengths_BQ.clamp(min=1), -1.0)
        pairs = -recipe.beta * F.logsigmoid(_difference(means) - _difference(_log1mexp(means)))
    else:
        pairs = -F.logsigmoid(margin)
    return torch.where(completions.present_BQ[:, ::2], pairs, 0.0)


def preference_metrics(logps_BQ: Tensor, completions: CompletionBatch, recipe: DPORecipe) -> Tensor:
    """Sums over all pairs of ``PAIR_METRICS``."""
    rewards, present_BP = _rewards(logps_BQ, completions, recipe), completions.present_BQ[:, ::2]
    chosen, rejected = rewards[:, ::2], rewards[:, 1::2]
    columns = [
        torch.ones_like(chosen),
        preference_losses(logps_BQ, completions, recipe),
        chosen,
        rejected,
        (chosen > rejected).float(),
        chosen - rejected,
        logps_BQ[:, ::2],
        logps_BQ[:, 1::2],
    ]
    return torch.stack([torch.where(present_BP, column, 0.0).sum() for column in columns])


def _rewards(logps_BQ: Tensor, completions: CompletionBatch, recipe: DPORecipe) -> Tensor:
    """What the loss compares: beta times the log-probability of each completion, relative to the reference."""
    rewards = recipe.beta * (logps_BQ - completions.reference_BQ)
    return rewards / completions.lengths_BQ.clamp(min=1) if recipe.loss in ("ipo", "simpo", "orpo") else rewards


def _difference(values_BQ: Tensor) -> Tensor:
    return values_BQ[:, ::2] - values_BQ[:, 1::2]


def _log1mexp(values: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, also near 0 and far from it."""
    values = values.clamp(max=-torch.finfo(torch.float32).eps)
    near = values > -0.6931
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, values, -0.1))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, values))),
    )


def kto_losses(logps_BQ: Tensor, completions: CompletionBatch, divergence: float, recipe: KTORecipe) -> Tensor:
    """The loss of each completion [B, Q], zero where a row has fewer.

    ``divergence`` estimates KL(model || reference), from completions to other prompts.
    """
    ratios = logps_BQ - completions.reference_BQ
    gain = torch.where(completions.desirable_BQ, ratios - divergence, divergence - ratios)
    weights = torch.where(completions.desirable_BQ, recipe.desirable_weight, recipe.undesirable_weight)
    return torch.where(completions.present_BQ, weights * (1 - torch.sigmoid(recipe.beta * gain)), 0.0)


def kto_metrics(logps_BQ: Tensor, completions: CompletionBatch, divergence: float, recipe: KTORecipe) -> Tensor:
    """Sums over all completions of ``KTO_METRICS``."""
    rewards = recipe.beta * (logps_BQ - completions.reference_BQ)
    columns = [completions.present_BQ.float(), kto_losses(logps_BQ, completions, divergence, recipe)]
    for side in (completions.present_BQ & completions.desirable_BQ, completions.present_BQ & ~completions.desirable_BQ):
        columns += [side.float(), torch.where(side, rewards, 0.0), torch.where(side, logps_BQ, 0.0)]
    return torch.stack([column.sum() for column in columns])
