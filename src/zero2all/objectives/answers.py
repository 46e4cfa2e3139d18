"""Answers of several conversations in a row, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class AnswerBatch:
    """The answers of some rows. Q is the largest number of answers in a row."""

    segments_BS: Tensor
    """1 + the number of the answer that a target belongs to; 0 where there is no target."""
    lengths_BQ: Tensor
    """Targets of each answer; 0 where a row has fewer answers."""
    desirable_BQ: Tensor
    """Of a pair the chosen one, or the label."""
    reference_BQ: Tensor
    """Log-probability by the reference model; 0 without one."""

    def rows(self, rows: slice | Tensor) -> AnswerBatch:
        return AnswerBatch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device) -> AnswerBatch:
        return AnswerBatch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))

    @property
    def present_BQ(self) -> Tensor:
        return self.lengths_BQ > 0

    def logps(self, losses_BS: Tensor) -> Tensor:
        """Log-probabilities of the answers [B, Q], from the loss of each token."""
        sums = losses_BS.new_zeros(len(losses_BS), self.lengths_BQ.shape[1] + 1)
        return -sums.scatter_add(1, self.segments_BS, losses_BS)[:, 1:]
