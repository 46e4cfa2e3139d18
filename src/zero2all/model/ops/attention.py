"""Causal attention, inside documents where rows are packed, inside a window where a layer has one.

A packed row has for each position where its document begins: ``doc_starts_BS``. Position i sees j where
``starts[i] <= j <= i`` and, with a window W, ``i - j < W``. Every backend first builds a mask from that, once for
all layers with the same window, and then attends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.model.ops.document_attention import MAX_FP32_BACKWARD, document_attention
from zero2all.model.ops.kernels import Kernel, builtin_kernel, needs_cuda
from zero2all.model.ops.varlen import (
    VarlenSequences,
    chunk_sequences,
    document_cu_seqlens,
    flatten_rows,
    has_flash_kernel,
    own_chunk_sequences,
    row_sequences,
    unflatten_rows,
    varlen_attention,
)
from zero2all.recipe import ModelConfig


class MaskInputs(NamedTuple):
    """What a mask is built from: rows of a length on a device, and the window of the layers that share it."""

    doc_starts_BS: Tensor | None
    length: int
    window: int | None
    device: torch.device
    cu_seqlens: Tensor | None = None
    """``document_cu_seqlens`` of the rows: with them there is no host sync."""


@dataclass(frozen=True)
class AttentionBackend:
    mask_for: Callable[[MaskInputs], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    """(q [B, H, S, E], k and v [B, K, S, E], mask) to [B, H, S, E]."""
    attend_with_dropout: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor] | None = None
    """The same with attention weights dropped with the probability given last; None if the kernel cannot."""


def document_starts(is_first_BS: Tensor) -> Tensor:
    """Where the document of each position starts, int32 [B, S], from the positions that are the first of a document.

    >>> document_starts(torch.tensor([[False, False, True, False]]))
    tensor([[0, 0, 2, 2]], dtype=torch.int32)

    These positions come from whatever packed the rows: no token says that it ends a document, since a chat template
    may write the end-of-text token after every message.
    """
    places = torch.arange(is_first_BS.shape[1], device=is_first_BS.device, dtype=torch.int32)
    starts: Tensor = torch.where(is_first_BS, places, 0).cummax(dim=1).values
    return starts


def attention_mask(
    doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device, first: int = 0
) -> Tensor:
    """The mask itself, bool [B or 1, 1, S, first + S]: which position from ``first`` on sees which."""
    rows = torch.arange(first, first + length, device=device)[:, None]
    columns = torch.arange(first + length, device=device)[None]
    mask = (columns <= rows)[None]
    if window is not None:
        mask = mask & (rows - columns < window)
    if doc_starts_BS is not None:
        mask = mask & (columns >= doc_starts_BS[:, :, None])
    shared: Tensor = mask[:, None]
    return shared


def _reference_mask(rows: MaskInputs) -> Tensor:
    return attention_mask(rows.doc_starts_BS, rows.length, rows.window, rows.device)


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    out: Tensor = F.dropout(weights, dropout) @ v.float()
    return out.to(q.dtype)


class SdpaMask(NamedTuple):
    """What queries at the positions from ``first`` on see; by default plain causal attention."""

    first: int = 0
    window: int | None = None
    doc_starts_BS: Tensor | None = None
    sequences: VarlenSequences | None = None
    """On CUDA, of documents."""
    dense: Tensor | None = None
    """On devices that have no kernel for documents and windows."""


def sdpa_mask(queries: MaskInputs, first: int = 0, row_length: int | None = None) -> SdpaMask:
    """For queries at positions [first, first + length) over keys [0, first + length).

    ``doc_starts_BS`` covers the queries, ``cu_seqlens`` whole rows of ``row_length``.
    """
    doc_starts_BS, length, window, device, cu_seqlens = queries
    window = None if window is None or window >= first + length else window
    if doc_starts_BS is None and window is None and not first:
        return SdpaMask()
    if device.type == "cpu":
        if doc_starts_BS is None:
            doc_starts_BS = torch.zeros(1, length, dtype=torch.int32, device=device)
        return SdpaMask(first, window, doc_starts_BS)
    if device.type != "cuda":
        return SdpaMask(dense=attention_mask(doc_starts_BS, length, window, device, first))
    if doc_starts_BS is None:
        return SdpaMask(first, window)
    if cu_seqlens is None:
        cu_seqlens = document_cu_seqlens(doc_starts_BS)
    return SdpaMask(first, window, doc_starts_BS, chunk_sequences(cu_seqlens, row_length or length, first, length))


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: SdpaMask) -> Tensor:
    """Flash, cuDNN or CPU kernels: scaled_dot_product_attention for plain rows, a varlen kernel for all others."""
    batch, length, first = len(q), q.shape[2], mask.first
    if q.device.type == "cpu" and mask.doc_starts_BS is not None:
        window = mask.window or first + length
        return document_attention(q, k, v, mask.doc_starts_BS.expand(batch, -1), window, first)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad and length <= MAX_FP32_BACKWARD:
        whole_row = torch.zeros(batch, length, dtype=torch.int32)
        return document_attention(q, k, v, whole_row, length)
    dense = mask.dense
    is_plain = not first and mask.window is None and mask.doc_starts_BS is None and dense is None
    if not is_plain and dense is None:
        if has_flash_kernel(q.device, q.dtype, q.shape[-1]):
            sequences = mask.sequences or row_sequences(batch, first, length, q.device)
            return varlen_attention(q, k, v, sequences, mask.window)
        dense = attention_mask(mask.doc_starts_BS, length, mask.window, q.device, first)  # fp32, or an old GPU
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, is_causal=is_plain, enable_gqa=q.shape[1] != k.shape[1]
    )


def _sdpa_with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: SdpaMask, dropout: float) -> Tensor:
    """No varlen or CPU kernel has dropout, so documents and windows take the mask of ``with_dense_mask``."""
    dense = with_dense_mask(mask, q.shape[2], q.device).dense
    if dense is not None and q.shape[1] != k.shape[1]:  # kernels that take a mask have no groups of queries
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, dropout_p=dropout, is_causal=dense is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def with_dense_mask(mask: SdpaMask, length: int, device: torch.device) -> SdpaMask:
    """With a bool [B, 1, S, S] mask, unless it is plain causal: for attention with dropout, once for all layers."""
    is_plain = not mask.first and mask.window is None and mask.doc_starts_BS is None
    if is_plain or mask.dense is not None:
        return mask
    return mask._replace(dense=attention_mask(mask.doc_starts_BS, length, mask.window, device, mask.first))


SDPA = AttentionBackend(sdpa_mask, attend_sdpa, _sdpa_with_dropout)


def cached_mask(positions_BS: Tensor, seen: int, window: int | None) -> Tensor:
    """Which of the first ``seen`` positions of a cache new positions see, bool [B, 1, S, seen]."""
    rows, columns = positions_BS[..., None], torch.arange(seen, device=positions_BS.device)
    mask = columns <= rows
    if window is not None and window < seen:
        mask = mask & (rows - columns < window)
    shared: Tensor = mask[:, None]
    return shared


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """New positions over a cache that contains them: k and v are longer than q."""
    if q.shape[2] > 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    # One position: the heads that share keys and values become positions, so that these are read once.
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)


class FlashMask(NamedTuple):
    window: tuple[int, int]
    sequences: VarlenSequences | None
    """The sequences of documents."""


def _flash_mask(rows: MaskInputs) -> FlashMask:
    reach = (-1 if rows.window is None else rows.window - 1, 0)
    if rows.doc_starts_BS is None:
        return FlashMask(reach, None)
    cu_seqlens = document_cu_seqlens(rows.doc_starts_BS) if rows.cu_seqlens is None else rows.cu_seqlens
    return FlashMask(reach, own_chunk_sequences(cu_seqlens, rows.length, 0, rows.length))


def _flash_unavailable_reason(device: torch.device, config: ModelConfig) -> str | None:
    no_dropout = "has no dropout, and model.attention_dropout is above 0" if config.attention_dropout else None
    return needs_cuda("flash_attn")(device, config) or no_dropout


def _flash() -> AttentionBackend:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask) -> Tensor:
        # Its backward adds up in any order unless it is asked not to; torch's setting does not reach it.
        more = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        options = {"causal": True, "window_size": mask.window, **more}
        if mask.sequences is None:
            attended: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            return attended.transpose(1, 2)
        out: Tensor = flash_attn_varlen_func(*map(flatten_rows, (q, k, v)), *mask.sequences, **options)
        return unflatten_rows(out, len(q))

    return AttentionBackend(_flash_mask, attend)


KERNELS = {
    "sdpa": builtin_kernel(SDPA),
    "flash": Kernel(_flash, _flash_unavailable_reason),
    "reference": builtin_kernel(AttentionBackend(_reference_mask, _reference, _reference)),
}
