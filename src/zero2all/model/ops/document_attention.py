"""Attention inside documents on CPU: one call for each document, or for each window of a long one.

Queries may be the last positions of their rows, as in context parallel: keys that come before all queries of a document
are a call of their own, merged by log-sum-exp. There is no mask of S x S: what a document may not see is not in its
call. It is an operation of its own, opaque to
torch.compile, because how many calls there are depends on the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero2all.base.torch_private import flash_attention_cpu, flash_attention_cpu_backward

MAX_FP32_BACKWARD = 1024
"""Up to this length torch's CPU kernel computes a backward pass in bf16 slower than in fp32, by 2 to 6 times.

``python -m benchmarks attention_cpu`` measures it, beside plain matrix products that keep all scores. On a CPU without
bf16 units these are slower than the kernel, or as fast (fp32, up to 128 tokens): there is no form for short rows. The
choice depends on length and type alone: a resumed run must compute the same.
"""


class Segment(NamedTuple):
    """Queries at positions [begin, end) of rows, which see keys from ``first_key`` on."""

    rows: slice
    first_key: int
    begin: int
    end: int

    def queries(self, first: int) -> tuple[slice, slice, slice]:
        return self.rows, slice(None), slice(self.begin - first, self.end - first)

    def calls(self, window: int, like: Tensor) -> list[KeyRange]:
        """The calls of the kernel, by the keys that they see."""
        own = KeyRange((self.rows, slice(None), slice(self.begin, self.end)), is_causal=True)
        if self.first_key == self.begin:
            return [own]
        if self.end - self.first_key <= window:
            return [own, KeyRange((self.rows, slice(None), slice(self.first_key, self.begin)))]
        keys = (self.rows, slice(None), slice(self.first_key, self.end))
        return [KeyRange(keys, mask=self._window_mask(window, like))]

    def _window_mask(self, window: int, like: Tensor) -> Tensor:
        """Added to the scores: -inf where a key is after the query or farther back than the window."""
        rows = torch.arange(self.begin, self.end)[:, None]
        columns = torch.arange(self.first_key, self.end)
        hidden = (columns > rows) | (rows - columns >= window)
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))[None, None]


class KeyRange(NamedTuple):
    keys: tuple[slice, slice, slice]
    is_causal: bool = False
    mask: Tensor | None = None


def segments(doc_starts_BS: Tensor, window: int, first: int = 0) -> Iterator[Segment]:
    """Segments of queries at the positions from ``first`` on, whose documents begin at ``doc_starts_BS``."""
    end = first + doc_starts_BS.shape[1]
    if window >= end and not doc_starts_BS.any():  # every row is one document
        yield Segment(slice(None), 0, first, end)
        return
    begins = doc_starts_BS == torch.arange(first, end, device=doc_starts_BS.device)
    begins[:, 0] = True  # the first document may have begun before
    places: list[list[int]] = begins.nonzero().tolist()
    starts: list[int] = doc_starts_BS[begins].tolist()
    for (row, place), start, (next_row, next_place) in zip(places, starts, [*places[1:], [-1, 0]], strict=True):
        stop = first + next_place if next_row == row else end
        for begin in range(first + place, stop, window):
            yield Segment(slice(row, row + 1), max(start, begin - window), begin, min(begin + window, stop))


def merge_attention(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each of them, [..., S, E] and [..., S]; in fp32."""
    both = torch.logaddexp(lse, more_lse)
    weighed = out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None]
    return weighed, both


@torch.library.custom_op("zero2all::document_attention", mutates_args=(), device_types="cpu")
def _forward(q: Tensor, k: Tensor, v: Tensor, doc_starts_BS: Tensor, window: int, first: int) -> tuple[Tensor, Tensor]:
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for segment in segments(doc_starts_BS, window, first):
        mine = segment.queries(first)
        (keys, is_causal, mask), *more = segment.calls(window, q)
        part, lse = flash_attention_cpu(q[mine], k[keys], v[keys], 0.0, is_causal, attn_mask=mask)
        for keys, is_causal, mask in more:
            other = flash_attention_cpu(q[mine], k[keys], v[keys], 0.0, is_causal, attn_mask=mask)
            part, lse = merge_attention(part, lse, *other)
        out[mine], sums[mine] = part, lse
    return out, sums


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, doc_starts_BS: Tensor, window: int, first: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("zero2all::document_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    doc_starts_BS: Tensor,
    window: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(segment.end - segment.first_key for segment in segments(doc_starts_BS, window, first))
    if longest <= MAX_FP32_BACKWARD:
        grad_q, grad_k, grad_v = _backward_segments(
            grad.float(), q.float(), k.float(), v.float(), out.float(), sums, doc_starts_BS, window, first
        )
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
    return _backward_segments(grad, q, k, v, out, sums, doc_starts_BS, window, first)


def _backward_segments(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    doc_starts_BS: Tensor,
    window: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for segment in segments(doc_starts_BS, window, first):
        mine = segment.queries(first)
        for call, (keys, is_causal, mask) in enumerate(segment.calls(window, q)):
            # With the log-sum-exp over all keys, a call gives its share of the gradient.
            in_q, in_k, in_v = flash_attention_cpu_backward(
                grad[mine], q[mine], k[keys], v[keys], out[mine], sums[mine], 0.0, is_causal, attn_mask=mask
            )
            grad_q[mine] = grad_q[mine] + in_q if call else in_q
            grad_k[keys] += in_k
            grad_v[keys] += in_v
    return grad_q, grad_k, grad_v


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    doc_starts_BS: Tensor,
    window: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, doc_starts_BS, ctx.window, ctx.first = inputs
    ctx.save_for_backward(q, k, v, *output, doc_starts_BS)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, sums, doc_starts_BS = ctx.saved_tensors
    return (*_backward(grad, q, k, v, out, sums, doc_starts_BS, ctx.window, ctx.first), None, None, None)


_forward.register_autograd(_gradient, setup_context=_setup_context)


def document_attention(
    q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, doc_starts_BS: Tensor, window: int, first: int = 0
) -> Tensor:
    """[B, H, S, E] of queries at the positions from ``first`` on; a window as long as the row is none."""
    out: Tensor = _forward(q_BHSE, k_BKSE, v_BKSE, doc_starts_BS, window, first)[0]
    return out
