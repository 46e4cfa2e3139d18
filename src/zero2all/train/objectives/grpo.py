"""Reinforcement learning with groups of completions: GRPO (https://arxiv.org/abs/2402.03300) and DAPO
(https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from zero2all.recipe.objective import GRPORecipe

STD_EPSILON = 1e-4


@dataclass(frozen=True)
class RolloutBatch:
    """Sampled completions in rows; every tensor has a value for each target of a row, 0 where there is none."""

    mask_BS: Tensor
    """1 for tokens of completions that count."""
    advantages_BS: Tensor
    sampler_BS: Tensor
    """Log-probability of each token by the sampler."""
    weights_BS: Tensor
    """1 divided by what the loss of a completion is divided by, such as its length."""

    def rows(self, rows: slice | Tensor) -> RolloutBatch:
        return RolloutBatch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device) -> RolloutBatch:
        return RolloutBatch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def group_advantages(rewards_PG: Tensor, recipe: GRPORecipe) -> Tensor:
    """Rewards of the completions to each prompt, relative to their mean, in standard deviations of the group.

    >>> group_advantages(torch.tensor([[1.0, 0.0]]), GRPORecipe())
    tensor([[ 0.7070, -0.7070]])
    """
    centred = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if not recipe.scale_rewards or rewards_PG.shape[1] < 2:
        return centred
    return centred / (rewards_PG.std(1, keepdim=True) + STD_EPSILON)


def grpo_losses(logps_BS: Tensor, rollouts: RolloutBatch, recipe: GRPORecipe) -> Tensor:
    """The loss of each token [B, S].

    Each completion is used for one update, so the ratio to the policy before it is 1 and never needs clipping: only its
    gradient counts. Where trainer and sampler disagree, a token is weighted by the ratio of its probabilities, up to
    ``importance_cap``.
    """
    old_BS = logps_BS.detach()
    ratio = torch.exp(logps_BS - old_BS)
    importance = torch.exp(old_BS - rollouts.sampler_BS).clamp(max=recipe.importance_cap)
    return -ratio * rollouts.advantages_BS * importance * rollouts.mask_BS * rollouts.weights_BS


def rollout_metrics(logps_BS: Tensor, rollouts: RolloutBatch, recipe: GRPORecipe) -> Tensor:
    """Sums over tokens: how many count, the loss, and how far trainer and sampler are apart."""
    gap = (logps_BS - rollouts.sampler_BS).abs() * rollouts.mask_BS
    return torch.stack([rollouts.mask_BS.sum(), grpo_losses(logps_BS, rollouts, recipe).sum(), gap.sum()])
