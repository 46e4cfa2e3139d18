"""Sequences of different lengths in flattened rows, as flash kernels for GPUs take them.

Everything is computed on the device from shapes that the host knows: no host sync.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SEQUENCE_MULTIPLE = 16


class VarlenSequences(NamedTuple):
    """Queries [cu_q[n], cu_q[n + 1]) over keys [cu_k[n], cu_k[n + 1]), causal with their last positions aligned."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def document_cu_seqlens(doc_starts_BS: Tensor, rows: int | None = None) -> Tensor:
    """Where documents begin in the flattened rows of each micro-batch of ``rows``, and where it ends: int32 [M, N + 1].

    A host sync, unless the starts are on CPU. N fits the micro-batch with the most documents, others are padded
    with empty ones: a flash kernel takes memory for each. It is rounded up, as a compiled block is compiled again for
    some new shapes.
    """
    batch, length = doc_starts_BS.shape
    rows = batch if rows is None else rows
    places = torch.arange(length, device=doc_starts_BS.device, dtype=torch.int32)
    begins_MT = (doc_starts_BS == places).view(batch // rows, rows * length)
    count = -(-int(begins_MT.sum(1).max()) // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
    tokens = torch.arange(rows * length, device=doc_starts_BS.device, dtype=torch.int32)
    sorted_MT = torch.where(begins_MT, tokens, rows * length).sort(dim=1).values
    return torch.nn.functional.pad(sorted_MT[:, :count], (0, max(1, count + 1 - rows * length)), value=rows * length)


def chunk_sequences(cu_seqlens: Tensor, row_length: int, first: int, length: int) -> VarlenSequences:
    """The documents of queries at positions [first, first + length) of rows, over keys [0, first + length)."""
    end, flat = first + length, cu_seqlens.flatten()
    row, place = flat // row_length, flat % row_length
    queries = row * length + place.clamp(first, end) - first
    return VarlenSequences(queries, row * end + place.clamp(max=end), length, end)


def own_chunk_sequences(cu_seqlens: Tensor, row_length: int, first: int, length: int) -> VarlenSequences:
    """The same over keys [first, first + length)."""
    queries = chunk_sequences(cu_seqlens, row_length, first, length).cu_q
    return VarlenSequences(queries, queries, length, length)


def row_sequences(batch: int, first: int, length: int, device: torch.device) -> VarlenSequences:
    """Sequences like ``chunk_sequences``, for rows of one document."""
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return VarlenSequences(rows * length, rows * (first + length), length, first + length)


def cumulative_lengths(begins_BD: Tensor, length: int) -> Tensor:
    """Sequences that begin at these places of each row, in flattened rows: int32 [B * D + 1]."""
    batch, device = len(begins_BD), begins_BD.device
    rows = torch.arange(batch, device=device, dtype=torch.int32) * length
    end = torch.full((1,), batch * length, device=device, dtype=torch.int32)
    return torch.cat([(rows[:, None] + begins_BD).flatten().int(), end])


def flatten_rows(x_BHSE: Tensor) -> Tensor:
    """[B * S, H, E]"""
    return x_BHSE.transpose(1, 2).flatten(0, 1)


def unflatten_rows(x_NHE: Tensor, batch: int) -> Tensor:
    """[B, H, S, E]"""
    return x_NHE.view(batch, -1, *x_NHE.shape[1:]).transpose(1, 2)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, sequences: VarlenSequences, window: int | None) -> Tensor:
    """[B, H, S, E] by torch's flash kernel; a query sees ``window`` positions."""
    from torch.nn.attention.varlen import varlen_attn

    q_NHE, k_NKE, v_NKE = map(flatten_rows, (q, k, v))
    out = varlen_attn(
        q_NHE,
        k_NKE,
        v_NKE,
        sequences.cu_q,
        sequences.cu_k,
        sequences.max_q,
        sequences.max_k,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return unflatten_rows(out, len(q))


def has_flash_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether torch's flash kernel takes such heads there: in 16 bits, from Ampere on."""
    if device.type != "cuda" or dtype.itemsize != 2 or head_size % 8 or head_size > 256:
        return False
    return bool(torch.cuda.get_device_properties(device).major >= 8)
