"""The gate of the feed-forward part: silu(gate) * up (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.model.ops.kernels import Kernel, builtin_kernel, needs_cuda

SwiGLU = Callable[[Tensor, Tensor], Tensor]  # gate, up


def reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up


def fused(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _liger() -> SwiGLU:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        if not gate.numel():  # experts without tokens: a grid of no blocks cannot be launched
            return fused(gate, up)
        out: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return out

    return swiglu


KERNELS = {
    "liger": Kernel(_liger, needs_cuda("liger_kernel")),
    "torch": builtin_kernel(fused),
    "reference": builtin_kernel(reference),
}
