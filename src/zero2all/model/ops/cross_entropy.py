"""The output head and the loss in one: cross-entropy of ``x @ weight.T`` without keeping all logits.

With a large vocabulary the logits of a batch, and then their gradient, are the largest tensors of a step.
Losses come one a token, fp32, zero where the target is IGNORE_INDEX. The z-loss is in the gradient only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zero2all.model.ops.chunked_loss import chunk_rows, chunked_loss
from zero2all.model.ops.kernels import IGNORE_INDEX, Kernel, builtin_kernel, needs_cuda
from zero2all.recipe import ModelConfig

MIN_REST = 1e-6  # of the probability of all other tokens


class HeadConfig(NamedTuple):
    """What a loss needs to know of the head."""

    vocab_size: int  # rows of the weight past it are padding
    softcap: float = 0.0  # 0 is none
    z_loss: float = 0.0


CrossEntropy = Callable[[Tensor, Tensor, Tensor, HeadConfig], Tensor]  # x [N, D], weight [rows, D], targets [N], head
Logits = Callable[[Tensor, Tensor, HeadConfig], Tensor]  # x [..., D], weight [rows, D], head


def compute_logits(x: Tensor, weight: Tensor, head: HeadConfig) -> Tensor:
    """[..., vocab]"""
    values = F.linear(x, weight.to(x.dtype))[..., : head.vocab_size]
    return head.softcap * torch.tanh(values / head.softcap) if head.softcap else values


def reference(x_ND: Tensor, weight: Tensor, targets_N: Tensor, head: HeadConfig) -> Tensor:
    values = compute_logits(x_ND, weight, head).float()
    losses = F.cross_entropy(values, targets_N, ignore_index=IGNORE_INDEX, reduction="none")
    if head.z_loss:
        extra = head.z_loss * values.logsumexp(-1).square() * (targets_N != IGNORE_INDEX)
        losses = losses + (extra - extra.detach())
    return losses


def chunked(x_ND: Tensor, weight: Tensor, targets_N: Tensor, head: HeadConfig) -> Tensor:
    return chunked_loss(x_ND, weight, targets_N, head.vocab_size, head.softcap, head.z_loss)


def torch_linear_cross_entropy(x_ND: Tensor, weight: Tensor, targets_N: Tensor, head: HeadConfig) -> Tensor:
    """PyTorch's own; it computes the logits twice, and knows no soft-cap and no z-loss."""
    weight = weight[: head.vocab_size].to(x_ND.dtype)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        x_ND, weight, targets_N, reduction="none", ignore_index=IGNORE_INDEX, options=options
    ).float()


def _torch_unavailable_reason(device: torch.device, config: ModelConfig) -> str | None:
    if config.final_logit_softcapping or config.z_loss:
        return "knows no soft-cap and no z-loss"
    return None


def _liger() -> CrossEntropy:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def cross_entropy(x_ND: Tensor, weight: Tensor, targets_N: Tensor, head: HeadConfig) -> Tensor:
        weight = weight[: head.vocab_size].to(x_ND.dtype)
        # The last one is what it adds up the weight's gradient in.
        settings = (None, None, IGNORE_INDEX, head.z_loss, 0.0, "none", head.softcap or None, True, torch.float32)
        losses, z_losses, *_ = LigerFusedLinearCrossEntropyFunction.apply(x_ND, weight, targets_N, *settings)
        value: Tensor = losses - z_losses.detach()
        return value

    return cross_entropy


KERNELS = {
    "liger": Kernel(_liger, needs_cuda("liger_kernel")),
    "chunked": builtin_kernel(chunked),
    "torch": Kernel(lambda: torch_linear_cross_entropy, _torch_unavailable_reason),
    "reference": builtin_kernel(reference),
}


class SoftTargets(NamedTuple):
    """What a teacher expects at each position."""

    ids_BSK: Tensor
    logps_BSK: Tensor
    weight: float
    """The teacher's weight in the loss; the right tokens have the rest."""


def soft_cross_entropy(x_ND: Tensor, weight: Tensor, ids_NK: Tensor, logps_NK: Tensor, head: HeadConfig) -> Tensor:
    """KL(teacher || student) of each token in fp32, a few rows of logits at a time, which backward computes again.

    The K likeliest tokens of the teacher have their own probabilities; all others are one more outcome, with what is
    left.
    """
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
