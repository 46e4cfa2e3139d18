"""Causal attention, inside documents where rows are packed, inside a window where a layer has one.

A packed row says for each position where its document begins: ``starts_BS``. Position i sees j where
``starts[i] <= j <= i`` and, with a window W, ``i - j < W``. Every form first makes a plan from that, once for all
layers with the same window, and then attends by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.model.ops.documents import document_attention
from zero2all.model.ops.forms import Form, needs_cuda, plain
from zero2all.recipe import ModelConfig


@dataclass(frozen=True)
class AttentionForm:
    plan: Callable[[Tensor | None, int, int | None, torch.device], Any]
    """(starts_BS, S, window, device): what the layers with this window share."""
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    """(q [B, H, S, E], k and v [B, K, S, E], plan) to [B, H, S, E]."""


def document_starts(tokens_BS: Tensor, end_of_text: int) -> Tensor:
    """Where the document of each position begins, int32 [B, S].

    A document begins at the end-of-text token that stands before it, as a prompt does in generation: so its first
    word has something to be predicted from, and nothing is predicted from another document.
    """
    places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device, dtype=torch.int32)
    starts: Tensor = torch.where(tokens_BS == end_of_text, places, 0).cummax(dim=1).values
    return starts


def visible(starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
    """The mask itself, bool [B or 1, 1, S, S]: which position sees which."""
    rows, columns = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    mask = (columns <= rows)[None]
    if window is not None:
        mask = mask & (rows - columns < window)
    if starts_BS is not None:
        mask = mask & (columns >= starts_BS[:, :, None])
    shared: Tensor = mask[:, None]
    return shared


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    out: Tensor = weights @ v.float()
    return out.to(q.dtype)


class SdpaPlan(NamedTuple):
    """At most one is set: nothing for plain causal attention, else what the device does best."""

    starts_BS: Tensor | None
    window: int
    mask: Tensor | None


def _plan_sdpa(starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> SdpaPlan:
    if starts_BS is None and (window is None or window >= length):
        return SdpaPlan(None, 0, None)
    if device.type != "cpu":  # one mask for all heads; flex and flash need none, which is why auto likes them better
        return SdpaPlan(None, 0, visible(starts_BS, length, window, device))
    if starts_BS is None:
        starts_BS = torch.zeros(1, length, dtype=torch.int32, device=device)
    return SdpaPlan(starts_BS, window or length, None)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, plan: SdpaPlan) -> Tensor:
    if plan.starts_BS is not None:
        return document_attention(q, k, v, plan.starts_BS.expand(q.shape[0], -1), plan.window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, is_causal=plan.mask is None, enable_gqa=grouped)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """New positions over a cache that ends with them: k and v are longer than q."""
    length, seen = q.shape[2], k.shape[2]
    mask = None
    if length > 1 or (window is not None and window < seen):
        rows = torch.arange(seen - length, seen, device=q.device)[:, None]
        columns = torch.arange(seen, device=q.device)
        mask = (columns <= rows) & (rows - columns < (window or seen))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _plan_flex(starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    reach = window or length

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        inside = (column <= row) & (row - column < reach)
        return inside if starts_BS is None else inside & (column >= starts_BS[batch, row])

    rows = None if starts_BS is None else starts_BS.shape[0]
    return create_block_mask(sees, rows, None, length, length, device=device)


def _flex() -> AttentionForm:
    import torch._inductor.config as inductor
    from torch.nn.attention.flex_attention import flex_attention

    # Without compiling it keeps all scores in memory. As a region of its own it is one operation for activation
    # checkpointing, which can keep what it gives.
    region = "wrap_inductor_compiled_regions"
    options: dict[str, Any] | None = {region: True} if hasattr(inductor, region) else None
    compiled = torch.compile(flex_attention, options=options)

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=plan, enable_gqa=q.shape[1] != k.shape[1])
        return out

    return AttentionForm(_plan_flex, attend)


def _why_not_flex(device: torch.device, config: ModelConfig) -> str | None:
    return None if device.type == "cuda" else f"computes no gradient on {device.type}"


class FlashPlan(NamedTuple):
    cuts: Tensor  # int32, where each document begins in the flattened rows, and the end
    longest: int
    window: tuple[int, int]


def _plan_flash(starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> FlashPlan | int:
    """Without documents only the window is needed."""
    back = -1 if window is None else window - 1
    if starts_BS is None:
        return back
    begins = starts_BS == torch.arange(length, device=device)
    cuts = begins.flatten().nonzero()[:, 0]
    cuts = torch.cat([cuts, cuts.new_tensor([begins.numel()])]).to(torch.int32)
    return FlashPlan(cuts, int(cuts.diff().max()), (back, 0))


def _flash() -> AttentionForm:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan | int) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Its backward adds up in any order unless it is asked not to; torch's setting does not reach it.
        more = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        if isinstance(plan, int):
            whole: Tensor = flash_attn_func(q, k, v, causal=True, window_size=(plan, 0), **more)
            return whole.transpose(1, 2)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        sizes = (plan.cuts, plan.cuts, plan.longest, plan.longest)
        out: Tensor = flash_attn_varlen_func(*flat, *sizes, causal=True, window_size=plan.window, **more)
        return out.view_as(q).transpose(1, 2)

    return AttentionForm(_plan_flash, attend)


FORMS = {
    "flash": Form(_flash, needs_cuda("flash_attn")),
    "flex": Form(_flex, _why_not_flex, "torch does not promise the same bits from its backward"),
    "sdpa": plain(AttentionForm(_plan_sdpa, _sdpa)),
    "reference": plain(AttentionForm(visible, _reference)),
}
