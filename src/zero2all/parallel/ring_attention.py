"""Ring attention: keys and values pass from rank to rank while each rank attends to the part that it has.

A rank never holds more than two parts of the sequence (https://arxiv.org/abs/2310.01889). Every rank has one chunk from
the front and one from the back of the sequence, so that all have the same work under the causal mask. Attention over
parts is merged by log-sum-exp; the backward pass sends keys and values around again, with their gradients behind them.
One operation for torch.compile and activation checkpointing. Shapes: C positions of a chunk.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zero2all.base.torch_private import (
    flash_attention_cpu,
    flash_attention_cpu_backward,
    process_group_by_name,
    varlen_backward,
    varlen_forward,
)
from zero2all.model.ops.document_attention import merge_attention, segments
from zero2all.model.ops.varlen import (
    VarlenSequences,
    cumulative_lengths,
    flatten_rows,
    has_flash_kernel,
    own_chunk_sequences,
    row_sequences,
    unflatten_rows,
)

Gradients = tuple[Tensor, Tensor, Tensor]


class ChunkPair(NamedTuple):
    """Queries of one chunk and keys of the same or an earlier one, by their indices in the sequence."""

    query: int
    key: int

    @property
    def is_diagonal(self) -> bool:
        return self.query == self.key


class PairKernel(Protocol):
    """Attention of a pair of chunks, [B, H, C, E] over [B, K, C, E]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pair: ChunkPair) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp in fp32 [B, H, C]: -inf where a query sees none of the keys."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: ChunkPair
    ) -> Gradients:
        """Gradients of queries, keys and values, given output and log-sum-exp over all keys."""


class DocumentChunks:
    """Which documents the chunks of a batch share: at most one reaches from a chunk to a later one."""

    def __init__(self, doc_starts_BS: Tensor | None, cu_seqlens: Tensor | None, length: int) -> None:
        self.doc_starts_BS, self.cu_seqlens, self.length = doc_starts_BS, cu_seqlens, length

    def visible_queries(self, pair: ChunkPair) -> Tensor:
        """The first queries of each row whose document begins before the end of the keys: how many, [B]."""
        assert self.doc_starts_BS is not None
        starts_BC = self.chunk(pair.query)
        reaches_back = starts_BC < (pair.key + 1) * self.length
        return (reaches_back & (starts_BC == starts_BC[:, :1])).sum(1, dtype=torch.int32)

    def first_keys(self, pair: ChunkPair) -> Tensor:
        """Where in the chunk of keys that document begins, [B]."""
        return (self.chunk(pair.query)[:, 0] - pair.key * self.length).clamp(0, self.length).int()

    def mask(self, pair: ChunkPair, device: torch.device) -> Tensor:
        """Which query sees which key, bool [B or 1, 1, C, C]."""
        places = torch.arange(self.length, device=device)
        rows, columns = places[:, None] + pair.query * self.length, places[None] + pair.key * self.length
        mask = (columns <= rows)[None]
        if self.doc_starts_BS is not None:
            mask = mask & (columns >= self.chunk(pair.query)[:, :, None])
        return mask[:, None]

    def chunk(self, index: int) -> Tensor:
        assert self.doc_starts_BS is not None
        return self.doc_starts_BS[:, index * self.length : (index + 1) * self.length]


class MathPairs:
    """The plain formulas, with the scores of a pair in memory: for fp32 on a GPU, and to compare with."""

    def __init__(self, documents: DocumentChunks) -> None:
        self._documents = documents

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pair: ChunkPair) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, pair)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # queries that see nothing
        return (weights @ self._repeat(v, q)).to(q.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: ChunkPair
    ) -> Gradients:
        grad, groups = grad.float(), q.shape[1] // k.shape[1]
        weights = (self._scores(q, k, pair) - lse[..., None]).exp()
        in_weights = grad @ self._repeat(v, q).mT
        in_scores = weights * (in_weights - (grad * out.float()).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        in_q, in_k, in_v = in_scores @ self._repeat(k, q), in_scores.mT @ q.float(), weights.mT @ grad
        in_k, in_v = (x.view(len(x), -1, groups, *x.shape[2:]).sum(2) for x in (in_k, in_v))
        return in_q.to(q.dtype), in_k.to(k.dtype), in_v.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, pair: ChunkPair) -> Tensor:
        scores = (q.float() @ self._repeat(k, q).mT) * q.shape[-1] ** -0.5
        masked: Tensor = scores.masked_fill(~self._documents.mask(pair, q.device), float("-inf"))
        return masked

    @staticmethod
    def _repeat(x: Tensor, q: Tensor) -> Tensor:
        return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


class CpuPairs:
    """torch's CPU kernel, one call for the rows of a document."""

    def __init__(self, documents: DocumentChunks) -> None:
        self._documents = documents

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pair: ChunkPair) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        for queries, keys in self._calls(pair):
            out[queries], lse[queries] = flash_attention_cpu(q[queries], k[keys], v[keys], 0.0, pair.is_diagonal)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: ChunkPair
    ) -> Gradients:
        found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in self._calls(pair):
            parts = flash_attention_cpu_backward(
                grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries], 0.0, pair.is_diagonal
            )
            for into, places, part in zip(found, (queries, keys, keys), parts, strict=True):
                into[places] = part
        return found

    def _calls(self, pair: ChunkPair) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Queries and keys of each call."""
        every, documents = slice(None), self._documents
        if documents.doc_starts_BS is None:
            return [((every,), (every,))]
        if not pair.is_diagonal:
            ends, begins = documents.visible_queries(pair).tolist(), documents.first_keys(pair).tolist()
            return [
                ((slice(row, row + 1), every, slice(end)), (slice(row, row + 1), every, slice(begin, None)))
                for row, (end, begin) in enumerate(zip(ends, begins, strict=True))
                if end
            ]
        first = pair.query * documents.length
        starts_BC = (documents.chunk(pair.query) - first).clamp(min=0)
        places = [segment.queries(0) for segment in segments(starts_BC, documents.length)]
        return [(place, place) for place in places]


class VarlenPairs:
    """torch's flash kernel for GPUs: every document is a sequence."""

    def __init__(self, documents: DocumentChunks) -> None:
        self._documents = documents

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pair: ChunkPair) -> tuple[Tensor, Tensor]:
        q_NHE, k_NKE, v_NKE = map(flatten_rows, (q, k, v))
        out, lse = varlen_forward(
            q_NHE, k_NKE, v_NKE, self._sequences(len(q), pair, q.device), is_causal=pair.is_diagonal
        )
        lse = lse.view(len(lse), len(q), -1).transpose(0, 1)
        if self._documents.doc_starts_BS is not None and not pair.is_diagonal:
            places = torch.arange(q.shape[2], device=q.device)
            hidden = places >= self._documents.visible_queries(pair)[:, None]
            lse = lse.masked_fill(hidden[:, None], float("-inf"))  # the kernel gives inf for an empty sequence
        return unflatten_rows(out, len(q)), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: ChunkPair
    ) -> Gradients:
        flat = [flatten_rows(x).contiguous() for x in (grad, q, k, v, out)]
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        found = varlen_backward(flat, lse, self._sequences(len(q), pair, q.device), is_causal=pair.is_diagonal)
        in_q, in_k, in_v = (unflatten_rows(x, len(q)) for x in found)
        return in_q, in_k, in_v

    def _sequences(self, batch: int, pair: ChunkPair, device: torch.device) -> VarlenSequences:
        documents, length = self._documents, self._documents.length
        if documents.doc_starts_BS is None:
            return row_sequences(batch, 0, length, device)
        if pair.is_diagonal:
            assert documents.cu_seqlens is not None
            assert documents.doc_starts_BS is not None
            row_length = documents.doc_starts_BS.shape[1]
            return own_chunk_sequences(documents.cu_seqlens, row_length, pair.query * length, length)
        # In each row: keys without queries, the document that both have, queries without keys.
        ends, begins = documents.visible_queries(pair), documents.first_keys(pair)
        nothing, all_keys = torch.zeros_like(ends), torch.full_like(ends, length)
        queries = cumulative_lengths(torch.stack([nothing, nothing, ends], dim=1), length)
        keys = cumulative_lengths(torch.stack([nothing, begins, all_keys], dim=1), length)
        return VarlenSequences(queries, keys, length, length)


def pair_kernel(like: Tensor, documents: DocumentChunks) -> PairKernel:
    if like.device.type == "cpu":
        return CpuPairs(documents)
    return VarlenPairs(documents) if has_flash_kernel(like.device, like.dtype, like.shape[-1]) else MathPairs(documents)


class Ring:
    """The ranks that a sequence is divided over; each sends to the next one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._next, self._previous = (dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1))

    def chunks(self, owner: int) -> tuple[int, int]:
        """The indices of a rank's chunks."""
        return owner, 2 * self.size - 1 - owner

    def owner(self, step: int) -> int:
        """Whose keys and values are here at a step."""
        return (self.rank - step) % self.size

    def pairs(self, step: int) -> list[tuple[int, int, ChunkPair]]:
        """What to compute then: which of the two own chunks with which of the owner's, a diagonal pair first."""
        own, theirs = self.chunks(self.rank), self.chunks(self.owner(step))
        pairs = [(i, j, ChunkPair(own[i], theirs[j])) for i in (0, 1) for j in (0, 1) if theirs[j] <= own[i]]
        return sorted(pairs, key=lambda found: not found[2].is_diagonal)

    def send(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to send it to the next rank and to receive the previous one's."""
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self.group),
            dist.P2POp(dist.irecv, received, self._previous, self.group),
        ]
        return received, dist.batch_isend_irecv(operations)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


@torch.library.custom_op("zero2all::ring_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, doc_starts_BS: Tensor | None, cu_seqlens: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    ring, length = Ring(process_group_by_name(group_name)), q.shape[2] // 2
    kernel = pair_kernel(q, DocumentChunks(doc_starts_BS, cu_seqlens, length))
    queries, held = torch.split(q, length, dim=2), torch.stack([k, v])
    outs: list[tuple[Tensor, Tensor] | None] = [None, None]
    for step in range(ring.size):
        is_last = step == ring.size - 1
        arriving, works = (held, []) if is_last else ring.send(held)  # while this rank computes
        keys, values = (torch.split(x, length, dim=2) for x in held)
        for i, j, pair in ring.pairs(step):
            out, lse = kernel.forward(queries[i], keys[j], values[j], pair)
            before = outs[i]
            outs[i] = (out.float(), lse) if before is None else merge_attention(*before, out, lse)
        _wait(works)
        held = arriving
    merged = [found for found in outs if found is not None]
    out = torch.cat([found[0] for found in merged], dim=2).to(q.dtype)
    return out, torch.cat([found[1] for found in merged], dim=2)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, doc_starts_BS: Tensor | None, cu_seqlens: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("zero2all::ring_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    doc_starts_BS: Tensor | None,
    cu_seqlens: Tensor | None,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring, length = Ring(process_group_by_name(group_name)), q.shape[2] // 2
    kernel = pair_kernel(q, DocumentChunks(doc_starts_BS, cu_seqlens, length))
    own = [torch.split(x, length, dim=2) for x in (grad, q, out, lse)]
    in_q, held = torch.zeros_like(q, dtype=torch.float32), torch.stack([k, v])
    gradients, gradient_works = torch.zeros_like(held, dtype=torch.float32), list[dist.Work]()
    for step in range(ring.size):
        is_last = step == ring.size - 1
        arriving, works = (held, []) if is_last else ring.send(held)
        keys, values = (torch.split(x, length, dim=2) for x in held)
        here = torch.zeros_like(gradients)
        for i, j, pair in ring.pairs(step):
            grad_i, q_i, out_i, lse_i = (x[i] for x in own)
            part_q, *part_kv = kernel.backward(grad_i, q_i, keys[j], values[j], out_i, lse_i, pair)
            torch.split(in_q, length, dim=2)[i].add_(part_q)
            torch.split(here, length, dim=3)[j].add_(torch.stack(part_kv))
        _wait(gradient_works)  # they follow their keys and values, one computation behind
        here += gradients
        gradients, gradient_works = ring.send(here)  # after the last step to their owner
        _wait(works)
        held = arriving
    _wait(gradient_works)
    # Contiguous, as the compiler is told; and copies, as outputs of an operation share no memory.
    in_k, in_v = (x.to(k.dtype, copy=True) for x in gradients)
    return in_q.to(q.dtype).contiguous(), in_k, in_v


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    doc_starts_BS: Tensor | None,
    cu_seqlens: Tensor | None,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    in_q, in_k, in_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return in_q, in_k, in_v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, doc_starts_BS, cu_seqlens, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output, doc_starts_BS, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, doc_starts_BS, cu_seqlens = ctx.saved_tensors
    found = _backward(grad, q, k, v, out, lse, doc_starts_BS, cu_seqlens, ctx.group_name)
    return (*found, None, None, None)


_forward.register_autograd(_gradient, setup_context=_setup_context)


@register_flop_formula(torch.ops.zero2all.ring_attention)
def _(q: tuple[int, ...], k: tuple[int, ...], *rest: Any, **more: Any) -> int:
    """Two products over every pair of the row, as for masked attention elsewhere; backward five."""
    return 2 * 2 * math.prod(q) * k[2] * process_group_by_name(rest[-1]).size()


@register_flop_formula(torch.ops.zero2all.ring_attention_backward)
def _(grad: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...], *rest: Any, **more: Any) -> int:
    return 5 * 2 * math.prod(q) * k[2] * process_group_by_name(rest[-1]).size()


def ring_attention(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    doc_starts_BS: Tensor | None,
    cu_seqlens: Tensor | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """[B, H, S, E] of this rank's two chunks over all ranks' chunks; documents are given for whole rows."""
    out: Tensor = _forward(q_BHSE, k_BKSE, v_BKSE, doc_starts_BS, cu_seqlens, group.group_name)[0]
    return out
