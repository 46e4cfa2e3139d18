"""Attention inside documents on CPU: one call for each document, or for each window of a long one.

There is no mask of S x S: what a document may not see is not in its call. It is an operation of its own, opaque to
torch.compile, because how many calls there are depends on the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero2all.torch_private import flash_attention_cpu, flash_attention_cpu_backward

MAX_FP32_BACKWARD = 1024
"""Up to this length torch's CPU kernel computes a backward pass in bf16 slower than in fp32, by up to 3 times."""


class Segment(NamedTuple):
    """Queries [begin, end) of rows over keys [first_key, end), masked if ``first_key`` is not ``begin``."""

    rows: slice
    first_key: int
    begin: int
    end: int

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        return self.rows, slice(None), slice(self.begin, self.end)

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        return self.rows, slice(None), slice(self.first_key, self.end)


def segments(doc_starts_BS: Tensor, window: int) -> Iterator[Segment]:
    length = doc_starts_BS.shape[1]
    if window >= length and not doc_starts_BS.any():  # every row is one document
        yield Segment(slice(None), 0, 0, length)
        return
    begins = doc_starts_BS == torch.arange(length, device=doc_starts_BS.device)
    places: list[list[int]] = begins.nonzero().tolist()
    for (row, start), (next_row, next_start) in zip(places, [*places[1:], [-1, 0]], strict=True):
        stop = next_start if next_row == row else length
        for begin in range(start, stop, window):
            yield Segment(slice(row, row + 1), max(start, begin - window), begin, min(begin + window, stop))


def _window_mask(segment: Segment, window: int, like: Tensor) -> Tensor | None:
    """Added to the scores: -inf where a key is after the query or farther back than the window."""
    if segment.first_key == segment.begin:
        return None
    rows = torch.arange(segment.begin, segment.end)[:, None]
    columns = torch.arange(segment.first_key, segment.end)
    hidden = (columns > rows) | (rows - columns >= window)
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))[None, None]


@torch.library.custom_op("zero2all::document_attention", mutates_args=(), device_types="cpu")
def _forward(q: Tensor, k: Tensor, v: Tensor, doc_starts_BS: Tensor, window: int) -> tuple[Tensor, Tensor]:
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for segment in segments(doc_starts_BS, window):
        mask, mine, seen = _window_mask(segment, window, q), segment.queries, segment.keys
        out[mine], sums[mine] = flash_attention_cpu(q[mine], k[seen], v[seen], 0.0, mask is None, attn_mask=mask)
    return out, sums


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, doc_starts_BS: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("zero2all::document_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, doc_starts_BS: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(segment.end - segment.first_key for segment in segments(doc_starts_BS, window))
    if longest <= MAX_FP32_BACKWARD:
        grad_q, grad_k, grad_v = _backward_segments(
            grad.float(), q.float(), k.float(), v.float(), out.float(), sums, doc_starts_BS, window
        )
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
    return _backward_segments(grad, q, k, v, out, sums, doc_starts_BS, window)


def _backward_segments(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, doc_starts_BS: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for segment in segments(doc_starts_BS, window):
        mask, mine, seen = _window_mask(segment, window, q), segment.queries, segment.keys
        grad_q[mine], in_k, in_v = flash_attention_cpu_backward(
            grad[mine], q[mine], k[seen], v[seen], out[mine], sums[mine], 0.0, mask is None, attn_mask=mask
        )
        grad_k[seen] += in_k  # windows overlap, so a key hears from two of them
        grad_v[seen] += in_v
    return grad_q, grad_k, grad_v


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, doc_starts_BS: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, doc_starts_BS, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, doc_starts_BS)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, sums, doc_starts_BS = ctx.saved_tensors
    return (*_backward(grad, q, k, v, out, sums, doc_starts_BS, ctx.window), None, None)


_forward.register_autograd(_gradient, setup_context=_setup_context)


def document_attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, doc_starts_BS: Tensor, window: int) -> Tensor:
    """[B, H, S, E]; a window as long as the row is none."""
    out: Tensor = _forward(q_BHSE, k_BKSE, v_BKSE, doc_starts_BS, window)[0]
    return out
