"""RMSNorm: scale to unit root-mean-square (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.model.ops.kernels import Kernel, builtin_kernel, needs_cuda

Norm = Callable[[Tensor, Tensor, float], Tensor]  # x [..., D], weight [D], eps


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # torch's CUDA kernel keeps x as it is and one number a row. With a weight of another type it is not used, and what
    # runs instead keeps two copies in fp32, as on a CPU.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _liger() -> Norm:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # No offset to the weight, cast as Llama does, and not in place: the residual stream is still needed.
        out: Tensor = LigerRMSNormFunction.apply(x, weight.to(x.dtype), eps, 0.0, "llama", False)
        return out

    return norm


KERNELS = {
    "liger": Kernel(_liger, needs_cuda("liger_kernel")),
    "torch": builtin_kernel(fused),
    "reference": builtin_kernel(reference),
}
