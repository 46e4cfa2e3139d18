"""Log-likelihood of continuations, which probes and benchmarks are made of.

Shapes: B rows of a batch, S sequence, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from zero2all.errors import UsageError, Z2aError
from zero2all.generation.rank_model import LocalModel, RankModel, as_rank_model
from zero2all.model import Z2all
from zero2all.model.blocks import ScoredTargets
from zero2all.model.rope_table import depends_on_length
from zero2all.parallel import ParallelModel
from zero2all.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
BATCH_TOKENS = 8192  # of one forward pass, with padding; bounds its memory


@dataclass(frozen=True)
class Request:
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


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
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
    return Request((tokenizer.eos_token_id, *whole[:split]), tuple(whole[split:]))


@torch.no_grad()
def score(model: Z2all | ParallelModel, requests: Sequence[Request], batch_tokens: int = BATCH_TOKENS) -> list[Score]:
    """The score of each request, in their order.

    A request longer than the model's context loses its beginning; its continuation has to fit. Rows of similar
    length are computed together, ``batch_tokens`` at a time, and requests that share all their input tokens, such as
    the letters of a multiple-choice question, share a row.

    With a model over ranks every rank calls this with the same requests and gets the same scores.

    >>> score(model, [encode_pair(tokenizer, "1 + 1 =", answer) for answer in (" 2", " 3")])
    """
    rank_model = as_rank_model(model)
    # Where the sequence is split over ranks, a pass is padded to equal parts, and the padding is in the context too.
    limit = rank_model.config.max_position_embeddings - (rank_model.sequence_multiple - 1)
    rows = _share_rows([_to_row(index, request, limit) for index, request in enumerate(requests)], rank_model)
    nats, greedy = np.zeros(len(requests)), np.ones(len(requests), dtype=bool)
    with rank_model.eval_mode():
        for batch in _batches(rows, batch_tokens):
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


def _to_row(index: int, request: Request, limit: int) -> _Row:
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


def _batches(rows: list[_Row], batch_tokens: int) -> Iterator[list[_Row]]:
    """Rows of similar length together; the longest first, so that memory is short at once or never."""
    waiting = sorted(rows, key=len)
    while waiting:
        count = min(len(waiting), max(1, batch_tokens // len(waiting[-1])))
        yield [waiting.pop() for _ in range(count)]


def _score_batch(model: LocalModel | RankModel, batch: list[_Row], nats: Array, greedy: Array) -> None:
    """Add the losses of the rows' requests to ``nats``, and clear ``greedy`` where a token is not the likeliest."""
    tokens_BS = np.zeros((len(batch), len(batch[0])), dtype=np.int64)
    owners: list[int] = []  # the request of each token
    rows: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for number, row in enumerate(batch):
        tokens_BS[number, : len(row)] = np.frombuffer(row.tokens, dtype=">u4")
        for index, continuation, place in row.requests:
            owners += [index] * len(continuation)
            rows += [number] * len(continuation)
            positions += range(place, place + len(continuation))
            targets += continuation
    device = model.device
    scored = ScoredTargets(
        *(torch.tensor(part, dtype=torch.int64, device=device) for part in (rows, positions, targets))
    )
    counts_B = torch.tensor([len(row) for row in batch], device=device)
    losses, likeliest = model.score(torch.from_numpy(tokens_BS).to(device), counts_B, scored).cpu().numpy()
    np.add.at(nats, owners, losses.astype(np.float64))
    np.logical_and.at(greedy, owners, likeliest > 0)
