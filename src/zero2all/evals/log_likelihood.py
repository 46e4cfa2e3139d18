"""Log-likelihood of continuations, which probes and benchmarks are made of.

Shapes: B rows of a batch, S sequence, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.base.errors import UsageError, Z2aError
from zero2all.generation.rank_model import LocalModel, RankModel, as_rank_model
from zero2all.model import Z2all
from zero2all.model.blocks import ScoredTargets
from zero2all.model.kv_cache import Branches
from zero2all.model.rope_table import depends_on_length
from zero2all.parallel import ParallelModel
from zero2all.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
MIN_SAVED_TOKENS = 16  # by which a packed row has to be shorter: its attention needs a mask
BATCH_TOKENS = 8192  # of one forward pass, with padding; bounds its memory
CPU_BATCH_TOKENS = (
    1024  # whose activations stay in the cache: 1.6 times as fast as 8192 with a model of 3.5M parameters
)


@dataclass(frozen=True)
class ScoringRequest:
    """Tokens to score, and those before them."""

    context: tuple[int, ...]
    """At least one token: the first of the continuation is predicted from it."""
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """How likely a continuation is."""

    nats: float
    """-log P(continuation | context)"""
    greedy: bool
    """Whether greedy decoding of the context gives the continuation."""


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> ScoringRequest:
    """The tokens of both, as lm-eval splits them, after an end-of-text token, as a document is in training.

    Both are encoded together, and the continuation is what follows as many tokens as the context has alone. Spaces
    at the end of the context become part of the continuation, since tokens begin with them.

    >>> encode_pair(tokenizer, "The capital of France is", " Paris")
    """
    stripped = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    split = len(tokenizer.encode(stripped)) if stripped else 0
    if continuation:  # a token over the boundary is of the continuation, which has one at least
        split = min(split, len(whole) - 1)
    return ScoringRequest((tokenizer.eos_token_id, *whole[:split]), tuple(whole[split:]))


@torch.no_grad()
def score(
    model: Z2all | ParallelModel, requests: Sequence[ScoringRequest], batch_tokens: int | None = None
) -> list[Score]:
    """The score of each request, in their order.

    A request longer than the model's context loses its beginning; its continuation has to fit. Rows of similar
    length are computed together, ``batch_tokens`` at a time. Requests that share all their input tokens, such as the
    letters of a multiple-choice question, share a row, and a long beginning that several share is computed once.

    With a model over ranks every rank calls this with the same requests and gets the same scores.

    >>> score(model, [encode_pair(tokenizer, "1 + 1 =", answer) for answer in (" 2", " 3")])
    """
    rank_model = as_rank_model(model)
    # Where the sequence is split over ranks, a pass is padded to equal parts, and the padding is in the context too.
    limit = rank_model.config.max_position_embeddings - (rank_model.sequence_multiple - 1)
    batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if rank_model.device.type == "cpu" else BATCH_TOKENS)
    rows = _share_rows([_to_row(index, request, limit) for index, request in enumerate(requests)], rank_model)
    packed = _pack(rows, rank_model, min(limit, batch_tokens))
    nats, greedy = np.zeros(len(requests)), np.ones(len(requests), dtype=bool)
    with rank_model.eval_mode():
        for batch in _batches(packed, batch_tokens):
            _score_batch(rank_model, batch, nats, greedy)
    if np.isnan(nats).any():
        raise Z2aError("the model's logits are NaN: its weights are damaged, try an earlier checkpoint")
    return [Score(float(sum_nats), bool(is_greedy)) for sum_nats, is_greedy in zip(nats, greedy, strict=True)]


@dataclass
class _Row:
    """Input tokens of one forward pass, and the requests that are scored in it: index, continuation, its place."""

    tokens: bytes  # big-endian, so that rows sort as their tokens do
    requests: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens) // 4


def _to_row(index: int, request: ScoringRequest, limit: int) -> _Row:
    context, continuation = request.context, request.continuation
    if not context:
        raise UsageError(f"request {index} has no context: give it at least the end-of-text token")
    if len(continuation) > limit:
        raise UsageError(
            f"request {index}: a continuation of {len(continuation)} tokens does not fit into the model's context of "
            f"{limit} tokens: shorten it, or use a model with a longer context"
        )
    tokens = (*context, *continuation[:-1])[-limit:]
    return _Row(
        np.array(tokens, dtype=">u4").tobytes(), [(index, continuation, len(tokens) - max(1, len(continuation)))]
    )


def _share_rows(rows: list[_Row], model: LocalModel | RankModel) -> list[_Row]:
    """Rows that are the beginning of another become part of it: what follows a position does not change it.

    A rotary table that depends on the length of a row is an exception: there only equal rows are merged.
    """
    needs_equal = depends_on_length(model.config)
    shared: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.tokens, reverse=True):
        # In this order a row comes right after those that it is the beginning of.
        last = shared[-1] if shared else None
        if last is not None and (last.tokens == row.tokens if needs_equal else last.tokens.startswith(row.tokens)):
            last.requests += row.requests
        else:
            shared.append(row)
    return shared


@dataclass
class _PackedRow:
    """Rows with a common beginning, computed as one: the beginning, then the rest of each."""

    common: int
    """The number of tokens that they share: all tokens of a single row."""
    rows: list[_Row]

    def __len__(self) -> int:
        return self.common + sum(len(row) - self.common for row in self.rows)


def _pack(rows: list[_Row], model: LocalModel | RankModel, limit: int) -> list[_PackedRow]:
    """Pack rows that share a beginning, in the order in which ``_share_rows`` sorted them, while that saves tokens."""
    packed: list[_PackedRow] = []
    for row in rows:
        last = packed[-1] if packed and not depends_on_length(model.config) else None
        if last is not None:
            common = min(last.common, _common_tokens(last.rows[-1].tokens, row.tokens))
            joined = _PackedRow(common, [*last.rows, row])
            if len(last) + len(row) - len(joined) >= MIN_SAVED_TOKENS and len(joined) <= limit:
                packed[-1] = joined
                continue
        packed.append(_PackedRow(len(row), [row]))
    return packed


def _common_tokens(left: bytes, right: bytes) -> int:
    size = min(len(left), len(right))
    differ = np.frombuffer(left, np.uint32, size // 4) != np.frombuffer(right, np.uint32, size // 4)
    return int(differ.argmax()) if differ.any() else size // 4


def _batches(rows: list[_PackedRow], batch_tokens: int) -> Iterator[list[_PackedRow]]:
    """Rows of similar length together; the longest first, so that memory is short at once or never.

    Single rows have batches of their own: causal attention is faster than one with a mask.
    """
    for waiting in ([row for row in rows if len(row.rows) > 1], [row for row in rows if len(row.rows) == 1]):
        waiting.sort(key=len)
        while waiting:
            count = min(len(waiting), max(1, batch_tokens // len(waiting[-1])))
            yield [waiting.pop() for _ in range(count)]


def _score_batch(model: LocalModel | RankModel, batch: list[_PackedRow], nats: Array, greedy: Array) -> None:
    """Add the losses of the rows' requests to ``nats``, and clear ``greedy`` where a token is not the likeliest."""
    tokens_BS, positions_BS, branches_BS = np.zeros((3, len(batch), len(batch[0])), dtype=np.int64)
    owners: list[int] = []  # the request of each token
    rows: list[int] = []
    places: list[int] = []
    targets: list[int] = []
    for number, packed in enumerate(batch):
        common = begin = packed.common
        for branch, row in enumerate(packed.rows, 1):
            end = begin + len(row) - common
            tokens = np.frombuffer(row.tokens, dtype=">u4")
            tokens_BS[number, :common], positions_BS[number, :common] = tokens[:common], np.arange(common)
            tokens_BS[number, begin:end], positions_BS[number, begin:end] = tokens[common:], np.arange(common, len(row))
            branches_BS[number, begin:end] = branch
            for index, continuation, first in row.requests:
                owners += [index] * len(continuation)
                rows += [number] * len(continuation)
                positions = range(first, first + len(continuation))
                places += [place if place < common else begin + place - common for place in positions]
                targets += continuation
            begin = end

    def to_tensor(values: Sequence[int] | Array) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=model.device)

    is_packed = any(len(packed.rows) > 1 for packed in batch)
    branches = Branches(to_tensor(positions_BS), to_tensor(branches_BS)) if is_packed else None
    scored = ScoredTargets(to_tensor(rows), to_tensor(places), to_tensor(targets))
    counts_B = to_tensor([len(packed) for packed in batch])
    losses, likeliest = model.score(to_tensor(tokens_BS), counts_B, scored, branches).cpu().numpy()
    np.add.at(nats, owners, losses.astype(np.float64))
    np.logical_and.at(greedy, owners, likeliest > 0)
