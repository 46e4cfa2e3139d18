"""Cross-entropy over a few rows at a time, its gradient computed along with it.

In training every loss weighs the same: the caller sums them and divides. So the gradient is computed in the same
pass, while a chunk's logits are there, for a weight of one, and scaled when the weight is known. A caller that
weighs tokens differently is recognised by the layout of its gradient (a sum's is one number, repeated) and pays
with a second pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero2all.model.ops.kernels import IGNORE_INDEX

CHUNK_BYTES = 64 * 2**20  # of fp32 logits under one matrix product
CPU_HALF_ROWS = 512  # from here on, a CPU is faster in bf16 and a conversion; with fewer rows memory is the limit
CPU_SUBCHUNK_BYTES = 4 * 2**20  # of them in one step on a CPU, where fresh memory costs more than the arithmetic
GPU_CHUNK_BYTES = 512 * 2**20
GPU_ROWS = (1024, 4096)  # every chunk reads the full weight three times: fewer rows than this are memory-bound


def chunk_rows(vocab_rows: int, device: torch.device) -> int:
    """Rows of logits under one matrix product."""
    if device.type == "cpu":
        return _rows(vocab_rows, CHUNK_BYTES)
    least, most = GPU_ROWS
    return min(most, max(least, GPU_CHUNK_BYTES // (4 * vocab_rows)))


def subchunk_rows(vocab_rows: int, device: torch.device) -> int:
    """Rows of logits that are in fp32 at one time."""
    return _rows(vocab_rows, CPU_SUBCHUNK_BYTES) if device.type == "cpu" else chunk_rows(vocab_rows, device)


def _rows(vocab_rows: int, size: int) -> int:
    return max(16, size // (4 * vocab_rows))


def chunked_forward_backward(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float, z_loss: float, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and with a scale for each row the gradients of x and weight, else empty ones.

    The gradient of weight is always in fp32: in bf16 each addition of a chunk would round the sum so far.
    """
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x) if scale is not None else x.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape if scale is not None else (0,), dtype=torch.float32)
    narrow = weight.to(x.dtype)
    rows = min(chunk_rows(len(weight), x.device), len(x))
    step = subchunk_rows(len(weight), x.device)
    logits_buffer = x.new_empty(rows, len(weight))
    for begin in range(0, len(x), rows):
        chunk = slice(begin, min(begin + rows, len(x)))
        logits = logits_buffer[: chunk.stop - begin]
        torch.mm(x[chunk], narrow.T, out=logits)
        for first in range(begin, chunk.stop, step):
            subchunk = slice(first, min(first + step, chunk.stop))
            weigh = None if scale is None else scale[subchunk]
            losses[subchunk] = _row_losses(
                logits[first - begin : subchunk.stop - begin], targets[subchunk], vocab, softcap, z_loss, weigh
            )
        if scale is not None:
            grad_x[chunk] = logits @ narrow
            if rows == len(x) >= CPU_HALF_ROWS and x.device.type == "cpu":
                # One product, so rounded once, as the gradient of any other weight.
                if x.dtype == grad_weight.dtype:
                    torch.mm(logits.T, x, out=grad_weight)
                else:
                    grad_weight.copy_(logits.T @ x)
            else:
                _add_product(grad_weight, logits, x[chunk])
    return losses, grad_x, grad_weight


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """``into += left.T @ right``, in fp32; the product is not rounded to the half precision of its factors first."""
    if left.dtype == into.dtype:
        into.addmm_(left.T, right)
    elif left.device.type != "cuda":  # no product of bf16 in fp32; on a CPU this is faster than a rounded one and a sum
        into.addmm_(left.T.float(), right.float())
    elif torch.cuda.get_device_capability(left.device) >= (8, 0):
        torch.addmm(into, left.T, right, out_dtype=torch.float32, out=into)
    else:
        into += left.T @ right


def _row_losses(
    logits: Tensor, targets: Tensor, vocab: int, softcap: float, z_loss: float, scale: Tensor | None
) -> Tensor:
    """The losses of some rows; with a scale, their logits become the gradient of them."""
    counts = targets != IGNORE_INDEX
    target_index = torch.where(counts, targets, 0)[:, None]
    seen = softcap * torch.tanh(logits / softcap) if softcap else logits
    seen[:, vocab:] = float("-inf")
    chosen = seen.gather(1, target_index).float()
    logs = torch.log_softmax(seen, dim=-1, dtype=torch.float32)
    losses = torch.where(counts, -logs.gather(1, target_index)[:, 0], 0.0)
    if scale is not None:
        weigh = torch.where(counts, scale, 0.0)[:, None]
        pull = 1.0 + 2.0 * z_loss * (chosen - logs.gather(1, target_index))  # the z-loss pulls with the log of the sum
        grad = logs.exp_().mul_(weigh * pull)
        grad.scatter_add_(1, target_index, -weigh)
        if softcap:
            grad *= 1.0 - (seen.float() / softcap).nan_to_num_(neginf=0.0).square_()
        logits.copy_(grad)
    return losses


@torch.library.custom_op("zero2all::chunked_loss", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float, z_loss: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    ones = torch.ones(len(x), device=x.device) if with_gradient else None
    return chunked_forward_backward(x, weight, targets, vocab, softcap, z_loss, ones)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float, z_loss: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    losses = x.new_empty(targets.shape, dtype=torch.float32)
    shape = weight.shape if with_gradient else (0,)
    return (
        losses,
        torch.empty_like(x) if with_gradient else x.new_empty(0),
        weight.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op("zero2all::chunked_loss_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    return chunked_forward_backward(x, weight, targets, vocab, softcap, z_loss, grad)[1:]


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, targets, *ctx.settings, _ = inputs
    ctx.save_for_backward(x, weight, targets, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, grad: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, targets, grad_x, grad_weight = ctx.saved_tensors
    if grad.stride() == (0,):  # every loss weighs the same
        grad_x = grad_x * grad[0].to(grad_x.dtype)
        # Rounded as it is scaled: a second fp32 buffer of the head's size would stand where memory peaks.
        scaled = torch.mul(grad_weight, grad[0], out=torch.empty_like(weight))
        return grad_x, scaled, None, None, None, None, None
    grad_x, grad_weight = _backward(grad.contiguous(), x, weight, targets, *ctx.settings)
    return grad_x, grad_weight.to(weight.dtype), None, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup_context)


def chunked_loss(x_ND: Tensor, weight: Tensor, targets_N: Tensor, vocab: int, softcap: float, z_loss: float) -> Tensor:
    """Losses [N] in fp32. The products are in the precision of x, their sum in fp32, rounded once at the end."""
    with_gradient = torch.is_grad_enabled() and (x_ND.requires_grad or weight.requires_grad)
    losses: Tensor = _forward(x_ND, weight, targets_N, vocab, softcap, z_loss, with_gradient)[0]
    return losses
