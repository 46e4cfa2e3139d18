"""Preference optimization with a label for each answer: KTO (https://arxiv.org/abs/2402.01306)."""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.objectives.answers import AnswerBatch
from zero2all.recipe.objective import KTORecipe

KTO_METRICS = ("answers", "loss", "chosen", "rewards/chosen", "logps/chosen", "rejected", "rewards/rejected",
               "logps/rejected")  # fmt: skip
"""What ``kto_metrics`` sums up."""


def kto_losses(logps_BQ: Tensor, answers: AnswerBatch, divergence: float, recipe: KTORecipe) -> Tensor:
    """The loss of each answer [B, Q], zero where a row has fewer.

    ``divergence`` estimates KL(model || reference), from answers to other prompts.
    """
    ratios = logps_BQ - answers.reference_BQ
    gain = torch.where(answers.desirable_BQ, ratios - divergence, divergence - ratios)
    weights = torch.where(answers.desirable_BQ, recipe.desirable_weight, recipe.undesirable_weight)
    return torch.where(answers.present_BQ, weights * (1 - torch.sigmoid(recipe.beta * gain)), 0.0)


def kto_metrics(logps_BQ: Tensor, answers: AnswerBatch, divergence: float, recipe: KTORecipe) -> Tensor:
    """Sums over all answers of ``KTO_METRICS``."""
    rewards = recipe.beta * (logps_BQ - answers.reference_BQ)
    columns = [answers.present_BQ.float(), kto_losses(logps_BQ, answers, divergence, recipe)]
    for side in (answers.present_BQ & answers.desirable_BQ, answers.present_BQ & ~answers.desirable_BQ):
        columns += [side.float(), torch.where(side, rewards, 0.0), torch.where(side, logps_BQ, 0.0)]
    return torch.stack([column.sum() for column in columns])
