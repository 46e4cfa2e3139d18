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
from zero2all.recipe import ModelConfig
from zero2all.torch_private import compiled_region_options


@dataclass(frozen=True)
class AttentionBackend:
    mask_for: Callable[[Tensor | None, int, int | None, torch.device], Any]
    """(doc_starts_BS, S, window, device): what the layers with this window share."""
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    """(q [B, H, S, E], k and v [B, K, S, E], mask) to [B, H, S, E]."""


def document_starts(tokens_BS: Tensor, end_of_text: int, end_of_text_first: bool = True) -> Tensor:
    """Where the document of each position begins, int32 [B, S].

    A document begins at the end-of-text token that stands before it, as a prompt does in generation: so its first
    word has something to be predicted from, and nothing is predicted from another document. Without
    ``end_of_text_first`` it begins after that token, as a conversation does that a chat template renders.
    """
    places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device, dtype=torch.int32)
    begins = tokens_BS == end_of_text
    if not end_of_text_first:
        begins = torch.nn.functional.pad(begins[:, :-1], (1, 0))
    starts: Tensor = torch.where(begins, places, 0).cummax(dim=1).values
    return starts


def attention_mask(doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
    """The mask itself, bool [B or 1, 1, S, S]: which position sees which."""
    rows, columns = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    mask = (columns <= rows)[None]
    if window is not None:
        mask = mask & (rows - columns < window)
    if doc_starts_BS is not None:
        mask = mask & (columns >= doc_starts_BS[:, :, None])
    shared: Tensor = mask[:, None]
    return shared


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    out: Tensor = weights @ v.float()
    return out.to(q.dtype)


class SdpaMask(NamedTuple):
    """At most one is set: nothing for plain causal attention, else what the device does best."""

    doc_starts_BS: Tensor | None
    window: int
    attn_mask: Tensor | None


def _sdpa_mask(doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> SdpaMask:
    if doc_starts_BS is None and (window is None or window >= length):
        return SdpaMask(None, 0, None)
    if device.type != "cpu":  # one mask for all heads; flex and flash need none, which is why auto prefers them
        return SdpaMask(None, 0, attention_mask(doc_starts_BS, length, window, device))
    if doc_starts_BS is None:
        doc_starts_BS = torch.zeros(1, length, dtype=torch.int32, device=device)
    return SdpaMask(doc_starts_BS, window or length, None)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: SdpaMask) -> Tensor:
    if mask.doc_starts_BS is not None:
        return document_attention(q, k, v, mask.doc_starts_BS.expand(q.shape[0], -1), mask.window)
    length = q.shape[2]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad and length <= MAX_FP32_BACKWARD:
        whole_row = torch.zeros(q.shape[0], length, dtype=torch.int32)
        return document_attention(q, k, v, whole_row, length)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.attn_mask, is_causal=mask.attn_mask is None, enable_gqa=grouped
    )


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


def _flex_mask(doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    reach = window or length

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        inside = (column <= row) & (row - column < reach)
        return inside if doc_starts_BS is None else inside & (column >= doc_starts_BS[batch, row])

    rows = None if doc_starts_BS is None else doc_starts_BS.shape[0]
    return create_block_mask(sees, rows, None, length, length, device=device)


def _flex() -> AttentionBackend:
    from torch.nn.attention.flex_attention import flex_attention

    # Without compiling it keeps all scores in memory. As a region of its own it is one operation for activation
    # checkpointing, which can save its output.
    compiled = torch.compile(flex_attention, options=compiled_region_options())

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out

    return AttentionBackend(_flex_mask, attend)


def _flex_unavailable_reason(device: torch.device, config: ModelConfig) -> str | None:
    return None if device.type == "cuda" else f"computes no gradient on {device.type}"


class VarlenMetadata(NamedTuple):
    cu_seqlens: Tensor  # int32, where each document begins in the flattened rows, and the end
    max_seqlen: int
    window: tuple[int, int]


def _flash_mask(
    doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device
) -> VarlenMetadata | int:
    """Without documents only the window is needed."""
    back = -1 if window is None else window - 1
    if doc_starts_BS is None:
        return back
    begins = doc_starts_BS == torch.arange(length, device=device)
    cu_seqlens = begins.flatten().nonzero()[:, 0]
    cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([begins.numel()])]).to(torch.int32)
    return VarlenMetadata(cu_seqlens, int(cu_seqlens.diff().max()), (back, 0))


def _flash() -> AttentionBackend:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: VarlenMetadata | int) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Its backward adds up in any order unless it is asked not to; torch's setting does not reach it.
        more = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        if isinstance(mask, int):
            attended: Tensor = flash_attn_func(q, k, v, causal=True, window_size=(mask, 0), **more)
            return attended.transpose(1, 2)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        sizes = (mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen)
        out: Tensor = flash_attn_varlen_func(*flat, *sizes, causal=True, window_size=mask.window, **more)
        return out.view_as(q).transpose(1, 2)

    return AttentionBackend(_flash_mask, attend)


KERNELS = {
    "flash": Kernel(_flash, needs_cuda("flash_attn")),
    "flex": Kernel(_flex, _flex_unavailable_reason, "torch does not promise the same bits from its backward"),
    "sdpa": builtin_kernel(AttentionBackend(_sdpa_mask, _sdpa)),
    "reference": builtin_kernel(AttentionBackend(attention_mask, _reference)),
}
