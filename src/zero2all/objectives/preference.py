"""Preference optimization with pairs of answers: DPO, IPO, hinge, robust DPO, SimPO, ORPO."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.objectives.answers import AnswerBatch
from zero2all.recipe.objective import DPORecipe

PAIR_METRICS = ("pairs", "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
                "logps/chosen", "logps/rejected")  # fmt: skip
"""What ``preference_metrics`` sums up."""


def preference_losses(logps_BQ: Tensor, answers: AnswerBatch, recipe: DPORecipe) -> Tensor:
    """The loss of each pair [B, P], zero where a row has fewer pairs. Answers are chosen, rejected, chosen, ..."""
    margin = _difference(_rewards(logps_BQ, answers, recipe))
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
        means = torch.where(answers.present_BQ, logps_BQ / answers.lengths_BQ.clamp(min=1), -1.0)
        pairs = -recipe.beta * F.logsigmoid(_difference(means) - _difference(_log1mexp(means)))
    else:
        pairs = -F.logsigmoid(margin)
    return torch.where(answers.present_BQ[:, ::2], pairs, 0.0)


def preference_metrics(logps_BQ: Tensor, answers: AnswerBatch, recipe: DPORecipe) -> Tensor:
    """Sums over all pairs of ``PAIR_METRICS``."""
    rewards, present_BP = _rewards(logps_BQ, answers, recipe), answers.present_BQ[:, ::2]
    chosen, rejected = rewards[:, ::2], rewards[:, 1::2]
    columns = [
        torch.ones_like(chosen),
        preference_losses(logps_BQ, answers, recipe),
        chosen,
        rejected,
        (chosen > rejected).float(),
        chosen - rejected,
        logps_BQ[:, ::2],
        logps_BQ[:, 1::2],
    ]
    return torch.stack([torch.where(present_BP, column, 0.0).sum() for column in columns])


def _rewards(logps_BQ: Tensor, answers: AnswerBatch, recipe: DPORecipe) -> Tensor:
    """What the loss compares: beta times the log-probability of each answer, relative to the reference."""
    rewards = recipe.beta * (logps_BQ - answers.reference_BQ)
    return rewards / answers.lengths_BQ.clamp(min=1) if recipe.loss in ("ipo", "simpo", "orpo") else rewards


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
