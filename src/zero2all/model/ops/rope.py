"""Rotary positions: turn each pair (i, i + E/2) of a head by its position's angle (https://arxiv.org/abs/2104.09864).

All in fp32: far positions need the digits. cos and sin come as one table [2, S, E], or [2, B, 1, S, E] where rows
have positions of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero2all.model.ops.kernels import Kernel, builtin_kernel, needs_cuda

Rope = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q [B, H, S, E], k [B, K, S, E], table


def reference(q_BHSE: Tensor, k_BKSE: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary

    def turn(x: Tensor) -> Tensor:
        wide = x.float()
        low, high = wide.chunk(2, dim=-1)
        turned: Tensor = wide * cos + torch.cat([-high, low], dim=-1) * sin
        return turned.type_as(x)

    return turn(q_BHSE), turn(k_BKSE)


def halves(q_BHSE: Tensor, k_BKSE: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """The same with half of the table, whose halves are equal, and one joining of the results."""
    cos, sin = rotary[..., : rotary.shape[-1] // 2]

    def turn(x: Tensor) -> Tensor:
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).type_as(x)

    return turn(q_BHSE), turn(k_BKSE)


def _liger() -> Rope:
    from liger_kernel.ops.rope import LigerRopeFunction

    def rope(q: Tensor, k: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.squeeze(2) if rotary.dim() == 5 else rotary[:, None]  # [B or 1, S, E]
        turned: tuple[Tensor, Tensor] = LigerRopeFunction.apply(q, k, cos, sin)
        return turned

    return rope


KERNELS = {
    "liger": Kernel(_liger, needs_cuda("liger_kernel")),
    "torch": builtin_kernel(halves),
    "reference": builtin_kernel(reference),
}
