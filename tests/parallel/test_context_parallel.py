"""Attention over a sequence that several ranks share: against the same attention in one process."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from zero2all.bench.rank_harness import run_ranks
from zero2all.model import document_starts
from zero2all.model.ops import OPS
from zero2all.model.ops.attention import AttentionBackend, MaskInputs
from zero2all.model.ops.document_attention import merge_attention
from zero2all.model.ops.varlen import (
    VarlenSequences,
    chunk_sequences,
    document_cu_seqlens,
    row_sequences,
    varlen_attention,
)
from zero2all.parallel import ParallelDims, ParallelMesh, ring_attention
from zero2all.parallel.context_parallel import ContextParallel
from zero2all.parallel.ring_attention import ChunkPair, CpuPairs, DocumentChunks, MathPairs, VarlenPairs
from zero2all.recipe import ParallelRecipe

CPU = torch.device("cpu")
LENGTH = 64
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def starts(kind: str, batch: int = 2) -> Tensor | None:
    """Documents that end inside chunks, at their ends, and that reach over several."""
    if kind == "none":
        return None
    tokens = torch.zeros(batch, LENGTH, dtype=torch.int64)
    tokens[0, [3, 8, 9, 16, 40]] = 1
    tokens[1, [21]] = 1
    return document_starts(tokens == 1)


def tensors(*heads: int, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, count, length, 8, generator=generator) for count in heads]


def plain(q: Tensor, k: Tensor, v: Tensor, doc_starts: Tensor | None, window: int | None, grad: Tensor) -> list[Tensor]:
    """Output and gradients of the reference over whole rows."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    backend = OPS["attention"]["reference"].load()
    out = backend.attend(q, k, v, backend.mask_for(MaskInputs(doc_starts, LENGTH, window, CPU)))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


CASES: list[tuple[Literal["allgather", "ring", "ulysses"], str, int | None]] = [
    ("allgather", "none", None),
    ("allgather", "some", None),
    ("allgather", "some", 11),
    ("allgather", "none", 40),
    ("ring", "none", None),
    ("ring", "some", None),
    ("ring", "some", 11),
    ("ulysses", "some", None),
]


def compiled_difference(backend: AttentionBackend, own: list[Tensor], mask: Any, out: Tensor, grad: Tensor) -> float:
    """From the same in eager mode; values come as a projection gives them, with heads in the last dimensions."""
    q, k, v = (x.detach().clone().requires_grad_() for x in own)
    flat_v = v.detach().transpose(1, 2).contiguous().requires_grad_()

    def attend(q: Tensor, k: Tensor, flat_v: Tensor) -> Tensor:
        return backend.attend(q * 1, k * 1, (flat_v * 1).transpose(1, 2), mask) * 1

    compiled = torch.compile(attend, backend="aot_eager")(q, k, flat_v)
    found = [compiled, *torch.autograd.grad(compiled, (q, k, flat_v), grad)]
    found[3] = found[3].transpose(1, 2)
    wanted = [out, *torch.autograd.grad(out, own, grad, retain_graph=True)]
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


def differences(ranks: int) -> list[tuple[float, int]]:
    """Of each case: the largest difference from the reference, and the bytes of masks that are kept for backward."""
    found = []
    q, k, v, grad = tensors(8, 4, 4, 8)
    for kind, documents, window in CASES:
        recipe = ParallelRecipe(cp=ranks, cp_attention=kind)
        mesh = ParallelMesh(ParallelDims.from_recipe(recipe, ranks), CPU)
        parallel = ContextParallel(mesh.get_mesh("cp"), recipe)
        mine = parallel.local_positions(LENGTH, CPU)
        backend = parallel._attention_backend(OPS["attention"]["sdpa"].load())
        mask = backend.mask_for(MaskInputs(starts(documents), LENGTH // ranks, window, CPU))
        own = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        kept: list[int] = []

        def note(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            if tensor.dim() == 4 and tensor.shape[-1] >= LENGTH // 2:  # as wide as keys, not as a head
                kept.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = backend.attend(*own, mask)
        if kind == "ring" and documents == "some" and window is None:
            found.append((compiled_difference(backend, own, mask, out, grad[:, :, mine]), 0))
        gradients = torch.autograd.grad(out, own, grad[:, :, mine])
        wanted = [x[:, :, mine] for x in plain(q, k, v, starts(documents), window, grad)]
        pairs = zip([out.detach(), *gradients], wanted, strict=True)
        found.append((max((one - other).abs().max().item() for one, other in pairs), sum(kept)))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_kind_equals_one_process_and_keeps_no_mask(ranks: int) -> None:
    cases = [*CASES[:5], "compiled ring", *CASES[5:]]
    for found in run_ranks(ranks, differences, ranks, seconds=240):
        for case, (difference, mask_bytes) in zip(cases, found, strict=True):
            assert difference < 1e-5, case
            assert mask_bytes == 0, case


def loop_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: VarlenSequences, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """What torch's flash kernel for GPUs is asked for, one sequence after another; inf where one has no keys."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), float("inf"))
    for queries, keys in places(sequences):
        if keys.stop > keys.start and queries.stop > queries.start:
            scores = masked_scores(q[queries], k[keys], is_causal)
            lse[:, queries] = scores.logsumexp(-1)
            out[queries] = (scores.softmax(-1) @ repeated(v[keys], q)).transpose(0, 1)
    return out, lse


def loop_backward(
    tensors: list[Tensor], lse: Tensor, sequences: VarlenSequences, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = tensors
    in_q, in_k, in_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in places(sequences):
        if keys.stop > keys.start and queries.stop > queries.start:
            own, groups = grad[queries].transpose(0, 1), q.shape[1] // k.shape[1]
            weights = (masked_scores(q[queries], k[keys], is_causal) - lse[:, queries, None]).exp()
            delta = (grad[queries] * out[queries]).sum(-1).transpose(0, 1)[..., None]
            in_scores = weights * (own @ repeated(v[keys], q).mT - delta) * q.shape[-1] ** -0.5
            in_q[queries] = (in_scores @ repeated(k[keys], q)).transpose(0, 1)
            summed = (in_scores.mT @ q[queries].transpose(0, 1), weights.mT @ own)
            in_k[keys], in_v[keys] = (x.view(-1, groups, *x.shape[1:]).sum(1).transpose(0, 1) for x in summed)
    return in_q, in_k, in_v


def places(sequences: VarlenSequences) -> list[tuple[slice, slice]]:
    ends = [[slice(*pair) for pair in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)] for cu in sequences[:2]]
    assert max(place.stop - place.start for place in ends[0]) <= sequences.max_q
    assert max(place.stop - place.start for place in ends[1]) <= sequences.max_k
    return list(zip(*ends, strict=True))


def repeated(x_NKE: Tensor, q: Tensor) -> Tensor:
    return x_NKE.repeat_interleave(q.shape[1] // x_NKE.shape[1], dim=1).transpose(0, 1)


def masked_scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = q.transpose(0, 1) @ repeated(k, q).mT * q.shape[-1] ** -0.5
    hidden = (
        torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(k) - len(q)).logical_not()
    )  # last positions aligned
    return scores.masked_fill(hidden, float("-inf")) if is_causal else scores


@pytest.mark.parametrize("documents", ["none", "some"])
@pytest.mark.parametrize("kernel", [CpuPairs, VarlenPairs])
def test_pairs_of_chunks_equal_the_plain_formulas(
    kernel: type[CpuPairs] | type[VarlenPairs], documents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_attention, "varlen_forward", loop_forward)
    monkeypatch.setattr(ring_attention, "varlen_backward", loop_backward)
    length, doc_starts = LENGTH // 8, starts(documents)
    chunks = DocumentChunks(doc_starts, None if doc_starts is None else document_cu_seqlens(doc_starts), length)
    fast, slow = kernel(chunks), MathPairs(chunks)
    for number in range(8):
        q, grad = tensors(4, 4, length=length, seed=number)
        pairs = [ChunkPair(number, key) for key in range(number, -1, -1)]
        keys = {pair: tensors(2, 2, length=length, seed=100 + pair.key) for pair in pairs}
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"))
        for place, pair in enumerate(pairs):
            one, other = (used.forward(q, *keys[pair], pair) for used in (fast, slow))
            torch.testing.assert_close(one[1], other[1], **TOLERANCE)
            torch.testing.assert_close(one[0], other[0], **TOLERANCE)
            out, lse = merge_attention(out, lse, *one) if place else one
        for pair in pairs:
            found = [used.backward(grad, q, *keys[pair], out, lse, pair) for used in (fast, slow)]
            for one_gradient, other_gradient in zip(*found, strict=True):
                torch.testing.assert_close(one_gradient, other_gradient, **TOLERANCE)


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("documents", ["none", "some"])
@pytest.mark.parametrize("first", [0, 24, 56])
def test_the_sequences_that_a_gpu_gets_are_those_of_the_mask(
    first: int, documents: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a GPU, with its kernel replaced by a loop over the sequences."""
    length = 8 if first else LENGTH

    def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *sequences: Any, window_size: Any, enable_gqa: bool) -> Tensor:
        assert enable_gqa
        assert window_size == (-1 if window is None else window - 1, 0)
        if window is None:
            return loop_forward(q, k, v, VarlenSequences(*sequences), is_causal=True)[0]
        out = torch.zeros_like(q)
        for queries, keys in places(VarlenSequences(*sequences)):
            scores = masked_scores(q[queries], k[keys], is_causal=True)
            near = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] - window + 1)
            weights = scores.masked_fill(~near, float("-inf")).softmax(-1)
            out[queries] = (weights @ repeated(v[keys], q)).transpose(0, 1)
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    q, k, v, grad = tensors(4, 2, 2, 4)
    doc_starts, end = starts(documents), first + length
    if doc_starts is None:
        sequences = row_sequences(2, first, length, CPU)
    else:
        sequences = chunk_sequences(document_cu_seqlens(doc_starts), LENGTH, first, length)
    out = varlen_attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], sequences, window)
    torch.testing.assert_close(out, plain(q, k, v, doc_starts, window, grad)[0][:, :, first:end], **TOLERANCE)


def test_cumulative_lengths_are_those_of_the_micro_batch_with_the_most_documents() -> None:
    doc_starts = starts("some")
    assert doc_starts is not None
    assert document_cu_seqlens(doc_starts).tolist() == [[0, 3, 8, 9, 16, 40, 64, 85, *[128] * 9]]
    assert document_cu_seqlens(doc_starts, 1).tolist() == [[0, 3, 8, 9, 16, 40, *[64] * 11], [0, 21, *[64] * 15]]


def test_more_documents_than_a_multiple_and_as_many_as_tokens() -> None:
    every_token = torch.arange(4, dtype=torch.int32)[None]
    assert document_cu_seqlens(every_token).tolist() == [[0, 1, 2, 3, *[4] * 13]]
    assert document_cu_seqlens(torch.arange(17, dtype=torch.int32)[None]).shape == (1, 33)
