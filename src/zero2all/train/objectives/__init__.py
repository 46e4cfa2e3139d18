"""Objectives beyond the loss of each token: what is minimized, as functions of log-probabilities.

Shapes: B rows, S sequence, Q answers of a row (padded), P pairs of a row.
"""

from zero2all.train.objectives.grpo import RolloutBatch, group_advantages, grpo_losses, rollout_metrics
from zero2all.train.objectives.preference import (
    KTO_METRICS,
    PAIR_METRICS,
    AnswerBatch,
    kto_losses,
    kto_metrics,
    preference_losses,
    preference_metrics,
)

__all__ = [
    "KTO_METRICS",
    "PAIR_METRICS",
    "AnswerBatch",
    "RolloutBatch",
    "group_advantages",
    "grpo_losses",
    "kto_losses",
    "kto_metrics",
    "preference_losses",
    "preference_metrics",
    "rollout_metrics",
]
