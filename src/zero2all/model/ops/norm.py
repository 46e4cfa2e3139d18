"""RMSNorm: scale to unit root-mean-square (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zero2all.model.ops.kernels import Kernel, builtin_kernel, needs_cuda

Norm = Callable[[Tensor, Tensor, float], Tensor]  # x [..., D], weight [D], eps


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


class CpuRmsNorm(torch.autograd.Function):
    """torch has no kernel of it for CPUs: its autograd reads and writes the rows two and a half times as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return wide.mul(scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        products = (grad * wide).reshape(-1, x.shape[-1])
        weight_grad = scale.reshape(-1) @ products
        along_x = (products @ weight.float()).reshape(scale.shape) * scale.pow(3).div_(x.shape[-1])
        x_grad = grad.mul(weight).mul_(scale).addcmul_(wide, along_x, value=-1)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type == "cpu":
        out: Tensor = CpuRmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return out
    # torch's CUDA kernel keeps x as it is and one number a row. With a weight of another type it is not used, and what
    # runs instead keeps two copies in fp32.
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
