"""Cross-entropy with the probabilities of a teacher in place of one right token, a few rows of logits at a time.

A teacher's K likeliest tokens have their own probabilities; all others are one more outcome, with what is left.
Shapes: N tokens, D hidden, K likeliest tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zero2all.model.ops.chunked_loss import chunk_rows
from zero2all.model.ops.cross_entropy import HeadConfig, compute_logits

MIN_REST = 1e-6  # of the probability of all other tokens


class SoftTargets(NamedTuple):
    """What a teacher expects at each position."""

    ids_BSK: Tensor
    logps_BSK: Tensor
    weight: float
    """Of the teacher in the loss; the rest is that of the right tokens."""


def soft_cross_entropy(x_ND: Tensor, weight: Tensor, ids_NK: Tensor, logps_NK: Tensor, head: HeadConfig) -> Tensor:
    """KL(teacher || student) of each token in fp32. Logits are computed again in the backward pass."""
    rows = chunk_rows(len(weight), x_ND.device)
    parts = zip(torch.split(x_ND, rows), torch.split(ids_NK, rows), torch.split(logps_NK, rows), strict=True)
    losses = [
        checkpoint(_divergence, x, weight, ids, logps, head, use_reentrant=False, preserve_rng_state=False)
        for x, ids, logps in parts
    ]
    return torch.cat(losses)


def _divergence(x_ND: Tensor, weight: Tensor, ids_NK: Tensor, logps_NK: Tensor, head: HeadConfig) -> Tensor:
    logits = compute_logits(x_ND, weight, head).float()
    own_NK = logits.gather(1, ids_NK) - logits.logsumexp(-1, keepdim=True)
    logps_NK = logps_NK.float()
    probabilities = logps_NK.exp()
    rest = (1 - probabilities.sum(-1)).clamp(min=MIN_REST)
    own_rest = (1 - own_NK.exp().sum(-1)).clamp(min=MIN_REST)
    return (probabilities * (logps_NK - own_NK)).sum(-1) + rest * (rest.log() - own_rest.log())


@torch.no_grad()
def likeliest_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the likeliest tokens, [..., K]."""
    values, ids = logits.float().topk(count, dim=-1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)
