"""The feed-forward parts of a mixture of experts, over tokens that are sorted by their expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.model.ops.kernels import builtin_kernel
from zero2all.model.ops.swiglu import SwiGLU

# x [N, D] sorted by expert, counts [E], gate and up [E, I, D], down [E, D, I], swiglu
ExpertsOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, SwiGLU], Tensor]


def reference(x_ND: Tensor, counts_E: Tensor, gate: Tensor, up: Tensor, down: Tensor, swiglu: SwiGLU) -> Tensor:
    """One expert after another."""
    parts = torch.split(x_ND, counts_E.tolist())
    matrices = zip(parts, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(swiglu(F.linear(x, g), F.linear(x, u)), d) for x, g, u, d in matrices])


def grouped(x_ND: Tensor, counts_E: Tensor, gate: Tensor, up: Tensor, down: Tensor, swiglu: SwiGLU) -> Tensor:
    """All experts in one operation a matrix; opaque to torch.compile, as its shapes depend on the data."""
    out: Tensor = _expert_matmul(
        swiglu(_expert_matmul(x_ND, gate, counts_E), _expert_matmul(x_ND, up, counts_E)), down, counts_E
    )
    return out


def _has_grouped_mm_kernel(x: Tensor) -> bool:
    """GPUs have a kernel for it, in bf16; elsewhere a loop is as fast.

    It writes rows up to the sum of the counts, and must not be called where that is none, as on a rank whose experts
    nobody wants. In a product over tokens it leaves blocks of experts without any uninitialised on some GPUs
    (pytorch/pytorch#172439).
    """
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def _group_offsets(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0).to(torch.int32)


@torch.library.custom_op("zero2all::expert_product", mutates_args=())
def _expert_matmul(x_ND: Tensor, weight_EID: Tensor, counts_E: Tensor) -> Tensor:
    """x @ weight.T, each token with the weight of its expert."""
    if not len(x_ND):
        return x_ND.new_empty(0, weight_EID.shape[1])
    if _has_grouped_mm_kernel(x_ND):
        return F.grouped_mm(x_ND, weight_EID.transpose(-2, -1), offs=_group_offsets(counts_E))
    out = x_ND.new_empty(len(x_ND), weight_EID.shape[1])
    sizes = counts_E.tolist()
    for x, weight, into in zip(torch.split(x_ND, sizes), weight_EID, torch.split(out, sizes), strict=True):
        torch.mm(x, weight.T, out=into)
    return out


@_expert_matmul.register_fake
def _(x_ND: Tensor, weight_EID: Tensor, counts_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EID.shape[1])


@torch.library.custom_op("zero2all::expert_weight_gradient", mutates_args=())
def _weight_gradient(grad_NI: Tensor, x_ND: Tensor, counts_E: Tensor) -> Tensor:
    if not len(x_ND):
        return x_ND.new_zeros(len(counts_E), grad_NI.shape[1], x_ND.shape[1])
    if _has_grouped_mm_kernel(x_ND):
        blocks = F.grouped_mm(grad_NI.T, x_ND, offs=_group_offsets(counts_E))
        return blocks.masked_fill_((counts_E == 0)[:, None, None], 0.0)
    out = x_ND.new_empty(len(counts_E), grad_NI.shape[1], x_ND.shape[1])
    sizes = counts_E.tolist()
    for grad, x, into in zip(torch.split(grad_NI, sizes), torch.split(x_ND, sizes), out, strict=True):
        torch.mm(grad.T, x, out=into)
    return out


@_weight_gradient.register_fake
def _(grad_NI: Tensor, x_ND: Tensor, counts_E: Tensor) -> Tensor:
    return x_ND.new_empty(counts_E.shape[0], grad_NI.shape[1], x_ND.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad_NI: Tensor) -> tuple[Tensor, Tensor, None]:
    x_ND, weight_EID, counts_E = ctx.saved_tensors
    grad_NI = grad_NI.contiguous()
    return _expert_matmul(grad_NI, weight_EID.mT, counts_E), _weight_gradient(grad_NI, x_ND, counts_E), None


_expert_matmul.register_autograd(_gradient, setup_context=_setup_context)

KERNELS = {"grouped": builtin_kernel(grouped), "reference": builtin_kernel(reference)}
