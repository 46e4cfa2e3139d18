"""Batched decoding: each prompt has a row of a static KV cache, and waiting prompts take the rows of finished ones.

Shapes: R rows of the cache, B rows of a forward pass, S sequence, T generated tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from zero2all.errors import Z2aError
from zero2all.generation.rank_model import Chosen, LocalModel, RankModel
from zero2all.generation.sampling import SamplingParams, choose_tokens
from zero2all.generation.text_stream import TextStream
from zero2all.model import KVCache
from zero2all.tokenizer import Tokenizer

PREFILL_TOKENS = 8192  # of one forward pass, with padding; bounds its memory
REFILL_SHARE = 1 / 8  # free rows before waiting prompts are read: few passes of many prompts, not one for each


@dataclass(frozen=True)
class Completion:
    """The text generated for a prompt."""

    text: str
    """Without end-of-text token and stop string."""
    tokens: list[int]
    """All generated tokens, also the end-of-text token or those of the stop string."""
    logprobs: list[float]
    """The log-probability of each token by the model, before temperature, filters and penalty."""
    finish_reason: Literal["stop", "length"]
    """``stop``: end of text, of a chat message, or a stop string. ``length``: ``max_tokens`` or the context is full."""
    prompt_tokens: list[int]
    """What the model read: of a prompt that is too long, the end."""


@dataclass(frozen=True)
class TextPiece:
    """The next piece of a text."""

    index: int
    """Which prompt it belongs to."""
    text: str
    completion: Completion | None = None
    """With the last piece: the full text."""


@dataclass(frozen=True)
class Request:
    """A prompt to complete."""

    index: int
    prompt_tokens: list[int]
    max_tokens: int
    """Prompt and text fit into the context."""
    occurrence: int
    """How many earlier requests have the same prompt."""

    def uniforms(self, seed: int) -> Tensor:
        """Random numbers in [0, 1), one a token. They depend on the prompt alone, not on other requests."""
        key = f"{seed}/{self.occurrence}/{self.prompt_tokens}".encode()
        own_seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        return torch.rand(self.max_tokens, generator=torch.Generator().manual_seed(own_seed))


@dataclass
class _Row:
    request: Request
    text: TextStream
    pieces: list[str] = field(default_factory=list)


class _RowTensors:
    """What was generated in each row, and what the next token depends on."""

    def __init__(self, rows: int, requests: list[Request], vocab: int, params: SamplingParams, device: torch.device):
        width = max((request.max_tokens for request in requests), default=0)
        self.tokens_RT = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.logprobs_RT = torch.zeros(rows, width, device=device)
        self.uniforms_RT = torch.zeros(rows, width, device=device)
        self.counts_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limits_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seen_RV = torch.zeros(
            rows, vocab if params.repetition_penalty != 1 else 0, dtype=torch.bool, device=device
        )
        self.params = params

    def start(self, row: int, request: Request) -> None:
        self.counts_R[row], self.limits_R[row] = 0, request.max_tokens
        if self.params.temperature > 0:
            self.uniforms_RT[row, : request.max_tokens] = request.uniforms(self.params.seed)
        if self.seen_RV.shape[1]:
            self.seen_RV[row] = False
            self.seen_RV[row, request.prompt_tokens] = True

    def move(self, source: int, target: int) -> None:
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor):
                tensor[target] = tensor[source]

    def choose(self, rows: slice, logits_BV: Tensor, forbidden_ids: Tensor) -> Chosen:
        """The next token of some rows."""
        seen_BV = self.seen_RV[rows] if self.seen_RV.shape[1] else None
        uniforms_B = self.uniforms_RT[rows].gather(1, self.counts_R[rows, None])[:, 0]
        allowed_BV = logits_BV.index_fill(1, forbidden_ids, -math.inf)
        tokens_B = choose_tokens(allowed_BV, self.params, uniforms_B, seen_BV)
        return Chosen(tokens_B, logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1))

    def append(self, rows: slice, chosen: Chosen) -> None:
        tokens_B1, counts_B1 = chosen.tokens_B[:, None], self.counts_R[rows, None]
        self.tokens_RT[rows].scatter_(1, counts_B1, tokens_B1)
        self.logprobs_RT[rows].scatter_(1, counts_B1, chosen.logprobs_B[:, None])
        if self.seen_RV.shape[1]:
            self.seen_RV[rows].scatter_(1, tokens_B1, True)
        self.counts_R[rows] += 1


class Decoder:
    """Completes requests, ``batch_size`` at a time.

    The active rows are always the first ones of the cache: the last row moves to the place of one that finished.
    So a finished row costs nothing, and nothing is copied but that row.
    """

    def __init__(
        self,
        model: LocalModel | RankModel,
        tokenizer: Tokenizer,
        requests: list[Request],
        params: SamplingParams,
        batch_size: int,
        every_token: bool,
    ) -> None:
        """With ``every_token`` text is decoded at every token, not once at the end."""
        device = model.device
        self._model, self._params, self._every_token = model, params, every_token or bool(params.stop)
        self._vocab_size, self._token_bytes = tokenizer.vocab_size, tokenizer.token_bytes
        end_ids = tokenizer.stop_token_ids
        forbidden_ids = sorted(set(tokenizer.special_ids.values()) - set(end_ids))
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=device)
        self._forbidden_ids = torch.tensor(forbidden_ids, dtype=torch.int64, device=device)
        # Prompts of similar length are read together; the longest first, so that memory is short at once or never.
        self._waiting = sorted(requests, key=lambda request: len(request.prompt_tokens))
        self._max_rows = min(batch_size, len(requests))
        length = max((len(request.prompt_tokens) + request.max_tokens for request in requests), default=0)
        self._cache = KVCache(self._max_rows, length + model.sequence_multiple - 1, device)
        self._tensors = _RowTensors(self._max_rows, requests, tokenizer.vocab_size, params, device)
        self._rows: list[_Row] = []

    @property
    def finished(self) -> bool:
        return not self._waiting and not self._rows

    @torch.no_grad()
    def step(self) -> list[TextPiece]:
        """Read waiting prompts if there is room, then generate one token in every row."""
        pieces: list[TextPiece] = []
        free = self._max_rows - len(self._rows)
        if not self._rows or free >= REFILL_SHARE * self._max_rows:
            while self._waiting and len(self._rows) < self._max_rows:
                pieces += self._read_prompts()
        if self._rows:
            last_B1 = self._tensors.tokens_RT[: len(self._rows)].gather(
                1, self._tensors.counts_R[: len(self._rows), None] - 1
            )
            pieces += self._generate(0, last_B1, None)
        return pieces

    def _read_prompts(self) -> list[TextPiece]:
        """Prefill as many prompts as one forward pass takes, and generate their first tokens."""
        first, width = len(self._rows), len(self._waiting[-1].prompt_tokens)
        count = min(len(self._waiting), self._max_rows - first, max(1, PREFILL_TOKENS // width))
        requests = [self._waiting.pop() for _ in range(count)]
        tokens_BS = torch.zeros(count, width, dtype=torch.int64)
        for number, request in enumerate(requests):
            tokens_BS[number, : len(request.prompt_tokens)] = torch.tensor(request.prompt_tokens)
            self._tensors.start(first + number, request)
            self._rows.append(_Row(request, TextStream(self._token_bytes, self._params.stop)))
        counts_B = torch.tensor([len(request.prompt_tokens) for request in requests])
        device = self._end_ids.device
        self._cache.select(first, first + count)
        self._cache.clear()
        pieces = self._generate(first, tokens_BS.to(device), counts_B.to(device))
        self._cache.select(0, len(self._rows))
        return pieces

    def _generate(self, first: int, tokens_BS: Tensor, counts_B: Tensor | None) -> list[TextPiece]:
        """The next token of all rows from ``first`` on, given their last tokens."""
        rows = slice(first, len(self._rows))
        logits_B1V = self._model.generate_logits(tokens_BS, self._cache, counts_B)
        self._cache.advance(tokens_BS.shape[1], counts_B)
        chosen = None
        if logits_B1V is not None:
            logits_BV = logits_B1V[:, 0, : self._vocab_size].float()
            chosen = self._tensors.choose(rows, logits_BV, self._forbidden_ids)
        chosen = self._model.broadcast(chosen, len(tokens_BS))
        self._tensors.append(rows, chosen)
        new_B = chosen.tokens_B
        ended_B = torch.isin(new_B, self._end_ids)
        full_B = self._tensors.counts_R[rows] >= self._tensors.limits_R[rows]
        numbers = range(len(new_B)) if self._every_token else (ended_B | full_B).nonzero()[:, 0].tolist()
        if not numbers:
            return []
        new, ended, full = new_B.tolist(), ended_B.tolist(), full_B.tolist()
        pieces = []
        active = len(self._rows)
        for number in reversed(numbers):  # from the last on, so that the row that moves has been looked at
            if self._every_token:
                tokens = [] if ended[number] else [new[number]]
            else:
                count = int(self._tensors.counts_R[first + number])
                tokens = self._tensors.tokens_RT[first + number, : count - ended[number]].tolist()
            piece = self._add_text(first + number, tokens, ended[number], full[number])
            if piece.text or piece.completion:
                pieces.append(piece)
        if len(self._rows) < active:
            self._cache.select(0, len(self._rows))
        return pieces

    def _add_text(self, number: int, tokens: list[int], ended: bool, full: bool) -> TextPiece:
        row = self._rows[number]
        text = row.text.push(tokens)
        if not (ended or full or row.text.stopped):
            row.pieces.append(text)
            return TextPiece(row.request.index, text)
        row.pieces.append(text + row.text.finish())
        count = int(self._tensors.counts_R[number])
        logprobs = self._tensors.logprobs_RT[number, :count].tolist()
        if any(math.isnan(logprob) for logprob in logprobs):
            raise Z2aError("the model's logits are NaN: its weights are damaged, try an earlier checkpoint")
        completion = Completion(
            text="".join(row.pieces),
            tokens=self._tensors.tokens_RT[number, :count].tolist(),
            logprobs=logprobs,
            finish_reason="stop" if ended or row.text.stopped else "length",
            prompt_tokens=row.request.prompt_tokens,
        )
        self._remove(number)
        return TextPiece(row.request.index, row.pieces[-1], completion)

    def _remove(self, number: int) -> None:
        last = len(self._rows) - 1
        if number < last:
            self._rows[number] = self._rows[last]
            self._tensors.move(last, number)
            self._cache.move(last, number)
        self._rows.pop()
