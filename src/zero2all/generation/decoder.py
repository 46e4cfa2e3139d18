"""Continuous batching: each prompt has a row of a static KV cache, and waiting prompts take the rows of finished ones.

Shapes: R rows of the cache, B rows of a forward pass, S sequence, T generated tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from zero2all.base.errors import Z2aError
from zero2all.generation.rank_model import Chosen, LocalModel, RankModel
from zero2all.generation.sampling import SamplingParams, TextStream, choose_tokens
from zero2all.model import KVCache
from zero2all.tokenizer import Tokenizer

PREFILL_TOKENS = 8192  # of one forward pass, with padding; bounds its memory
NAN_LOGITS = "the model's logits are NaN: its weights are damaged, try an earlier checkpoint"
REFILL_SHARE = 1 / 8  # free rows before waiting prompts are read: few passes of many prompts, not one for each


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model expected at a position, before temperature, filters and penalty."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens, as many as were asked for."""


@dataclass(frozen=True)
class Completion:
    """The text generated for a prompt."""

    text: str
    """Without end-of-text token and stop string."""
    tokens: list[int]
    """All generated tokens, also the end-of-text token or the stop string's."""
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
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens since the last piece, where they were asked for."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to complete."""

    index: int
    prompt_tokens: list[int]
    max_tokens: int
    """Prompt and text fit into the context."""
    params: SamplingParams
    occurrence: int = 0
    """Equal prompts have random numbers of their own if this differs, such as by how many earlier ones are the same."""
    top_logprobs: int | None = None
    """How many tokens to report log-probabilities of at each position; None for no report."""
    special_tokens: tuple[int, ...] = ()
    """Special tokens that may be generated, besides those that end the text. They are text then."""

    def uniforms(self, seed: int) -> Tensor:
        """Random numbers in [0, 1), one a token. They depend on the prompt alone, not on other requests."""
        key = f"{seed}/{self.occurrence}/{self.prompt_tokens}".encode()
        own_seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        return torch.rand(self.max_tokens, generator=torch.Generator().manual_seed(own_seed))

    @property
    def needs_every_token(self) -> bool:
        return bool(self.params.stop) or self.top_logprobs is not None


@dataclass
class _Row:
    request: GenerationRequest
    text: TextStream
    choice_params: SamplingParams
    """What a token depends on: parameters without seed, limit and stop strings, so that most rows have the same."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class _RowTensors:
    """What was generated in each row, and what the next token depends on."""

    def __init__(self, rows: int, width: int, vocab: int, device: torch.device):
        self.tokens_RT = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.logprobs_RT = torch.zeros(rows, width, device=device)
        self.uniforms_RT = torch.zeros(rows, width, device=device)
        self.counts_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limits_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seen_RV = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self._vocab = vocab

    def start(self, row: int, request: GenerationRequest) -> None:
        self.counts_R[row], self.limits_R[row] = 0, request.max_tokens
        if request.params.temperature > 0:
            self.uniforms_RT[row, : request.max_tokens] = request.uniforms(request.params.seed)
        if request.params.repetition_penalty != 1:
            if not self.seen_RV.shape[1]:
                self.seen_RV = self.seen_RV.new_zeros(len(self.seen_RV), self._vocab)
            self.seen_RV[row] = False
            self.seen_RV[row, request.prompt_tokens] = True

    def move(self, source: int, target: int) -> None:
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor):
                tensor[target] = tensor[source]

    def choose(self, rows: Tensor | slice, logits_BV: Tensor, params: SamplingParams) -> Tensor:
        """The next token of rows with the same parameters."""
        seen_BV = self.seen_RV[rows] if params.repetition_penalty != 1 else None
        uniforms_B = self.uniforms_RT[rows].gather(1, self.counts_R[rows][:, None])[:, 0]
        return choose_tokens(logits_BV, params, uniforms_B, seen_BV)

    def append(self, rows: slice, chosen: Chosen) -> None:
        tokens_B1, counts_B1 = chosen.tokens_B[:, None], self.counts_R[rows, None]
        self.tokens_RT[rows].scatter_(1, counts_B1, tokens_B1)
        self.logprobs_RT[rows].scatter_(1, counts_B1, chosen.logprobs_B[:, None])
        if self.seen_RV.shape[1]:
            self.seen_RV[rows].scatter_(1, tokens_B1, True)
        self.counts_R[rows] += 1


@dataclass(frozen=True)
class DecoderSize:
    """The requests that a decoder has room for."""

    rows: int
    """Number of requests that are generated at the same time."""
    length: int
    """Maximum number of tokens of prompt and text of a request together."""
    width: int | None = None
    """Maximum number of tokens of its text. Default: ``length``."""


class Decoder:
    """Completes requests, several at a time; more may be added at any time.

    The active rows are always the first ones of the cache: the last row moves to the place of one that finished.
    So a finished row costs nothing, and nothing is copied but that row.

    >>> decoder = Decoder(as_rank_model(model), tokenizer, DecoderSize(rows=8, length=2048))
    >>> decoder.add(GenerationRequest(0, [1, 2, 3], max_tokens=20, params=SamplingParams()))
    >>> while not decoder.finished:
    ...     pieces = decoder.step()
    """

    def __init__(
        self,
        model: LocalModel | RankModel,
        tokenizer: Tokenizer,
        size: DecoderSize,
        *,
        every_token: bool = True,
        refill_share: float = 0.0,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """Without ``every_token``, text is decoded once at the end.

        Waiting prompts are read when ``refill_share`` of the rows are free. ``on_failure`` is called with the index of
        a request that fails alone, such as by NaN logits; without it, that raises.
        """
        device = model.device
        self._model, self._every_token, self._refill_share = model, every_token, refill_share
        self._on_failure = on_failure
        self._vocab_size, self._token_bytes = tokenizer.vocab_size, tokenizer.token_bytes
        forbidden_ids = sorted(set(tokenizer.control_ids) - set(tokenizer.stop_token_ids))
        self._end_ids = torch.tensor(tokenizer.stop_token_ids, dtype=torch.int64, device=device)
        self._forbidden_ids = torch.tensor(forbidden_ids, dtype=torch.int64, device=device)
        self._max_rows = size.rows
        self._length, self._device = size.length + model.sequence_multiple - 1, device
        self._cache = KVCache(size.rows, self._length, device)
        self._tensors = _RowTensors(size.rows, size.width or size.length, tokenizer.vocab_size, device)
        self._waiting: deque[GenerationRequest] = deque()
        self._rows: list[_Row] = []

    @property
    def finished(self) -> bool:
        return not self._waiting and not self._rows

    @property
    def active(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(request)

    def remove(self, index: int) -> None:
        """Forget a request, wherever it is."""
        self._waiting = deque(request for request in self._waiting if request.index != index)
        for number, row in enumerate(self._rows):
            if row.request.index == index:
                self._remove_row(number)
                self._cache.select(0, len(self._rows))
                return

    def clear(self) -> None:
        """Forget all requests, and what an error may have left in the cache."""
        self._waiting.clear()
        self._rows.clear()
        self._cache = KVCache(self._max_rows, self._length, self._device)

    @torch.no_grad()
    def step(self) -> list[TextPiece]:
        """Read waiting prompts if there is room, then generate one token in every row."""
        pieces: list[TextPiece] = []
        free = self._max_rows - len(self._rows)
        if self._waiting and free and (not self._rows or free >= self._refill_share * self._max_rows):
            pieces += self._read_prompts()
            while self._refill_share and self._waiting and len(self._rows) < self._max_rows:
                pieces += self._read_prompts()
        if self._rows:
            last_B1 = self._tensors.tokens_RT[: len(self._rows)].gather(
                1, self._tensors.counts_R[: len(self._rows), None] - 1
            )
            pieces += self._generate(0, self._model_logits(last_B1, None))
        return pieces

    def _read_prompts(self) -> list[TextPiece]:
        """Prefill as many prompts as one forward pass takes, and generate their first tokens."""
        first, requests = len(self._rows), self._next_requests()
        for number, request in enumerate(requests):
            self._tensors.start(first + number, request)
            same = replace(request.params, seed=0, max_tokens=1, stop=())
            self._rows.append(_Row(request, TextStream(self._token_bytes, request.params.stop), same))
        self._cache.select(first, len(self._rows))
        self._cache.clear()
        width = max(len(request.prompt_tokens) for request in requests)
        tokens_BS = torch.zeros(len(requests), width, dtype=torch.int64)
        for number, request in enumerate(requests):
            tokens_BS[number, : len(request.prompt_tokens)] = torch.tensor(request.prompt_tokens)
        counts_B = torch.tensor([len(request.prompt_tokens) for request in requests])
        pieces = self._generate(first, self._model_logits(tokens_BS.to(self._device), counts_B.to(self._device)))
        self._cache.select(0, len(self._rows))
        return pieces

    def _next_requests(self) -> list[GenerationRequest]:
        """The requests of one forward pass."""
        requests = [self._waiting.popleft()]
        width = len(requests[0].prompt_tokens)
        while self._waiting:
            width = max(width, len(self._waiting[0].prompt_tokens))
            if len(requests) + len(self._rows) >= self._max_rows or width * (len(requests) + 1) > PREFILL_TOKENS:
                break
            requests.append(self._waiting.popleft())
        return requests

    def _model_logits(self, tokens_BS: Tensor, counts_B: Tensor | None) -> Tensor | None:
        """The logits of the next token of the selected rows, on the rank that has them."""
        logits_B1V = self._model.generate_logits(tokens_BS, self._cache, counts_B)
        self._cache.advance(tokens_BS.shape[1], counts_B)
        return None if logits_B1V is None else logits_B1V[:, 0, : self._vocab_size].float()

    def _generate(self, first: int, logits_BV: Tensor | None) -> list[TextPiece]:
        """The next token of all rows from ``first`` on, given their logits."""
        rows = slice(first, len(self._rows))
        chosen = None if logits_BV is None else self._choose(first, logits_BV)
        chosen = self._model.broadcast(chosen, len(self._rows) - first)
        self._tensors.append(rows, chosen)
        new_B = chosen.tokens_B
        ended_B = torch.isin(new_B, self._end_ids)
        full_B = self._tensors.counts_R[rows] >= self._tensors.limits_R[rows]
        if self._every_token:
            numbers: Iterable[int] = range(len(new_B))
        else:
            done = set((ended_B | full_B).nonzero()[:, 0].tolist())
            every = {n for n, row in enumerate(self._rows[first:]) if row.request.needs_every_token}
            numbers = sorted(done | every)
        if not numbers:
            return []
        new, ended, full = new_B.tolist(), ended_B.tolist(), full_B.tolist()
        has_nan = chosen.logprobs_B.isnan().tolist()
        pieces = []
        active = len(self._rows)
        for number in reversed(list(numbers)):  # from the last on, so that the row that moves has been looked at
            try:
                if has_nan[number]:
                    raise Z2aError(NAN_LOGITS)
                self._note_token(self._rows[first + number], new[number], logits_BV, number)
                piece = self._add_token(first + number, new[number], ended=ended[number], full=full[number])
            except Exception as error:  # of this row alone
                self._fail_row(first + number, error)
                continue
            if piece.text or piece.completion or piece.logprobs:
                pieces.append(piece)
        if len(self._rows) < active:
            self._cache.select(0, len(self._rows))
        return pieces

    def _fail_row(self, number: int, error: Exception) -> None:
        """Without memory no row can go on; any other error is the row's own."""
        if self._on_failure is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise error
        index = self._rows[number].request.index
        self._remove_row(number)
        self._on_failure(index, error)

    def _choose(self, first: int, logits_BV: Tensor) -> Chosen:
        """Rows with the same parameters together."""
        allowed_BV = self._mask_forbidden(first, logits_BV)
        groups: dict[SamplingParams, list[int]] = {}
        for number, row in enumerate(self._rows[first:]):
            groups.setdefault(row.choice_params, []).append(number)
        if len(groups) == 1:
            [params] = groups
            tokens_B = self._tensors.choose(slice(first, len(self._rows)), allowed_BV, params)
        else:
            tokens_B = torch.empty(len(logits_BV), dtype=torch.int64, device=logits_BV.device)
            for params, numbers in groups.items():
                places = torch.tensor(numbers, device=logits_BV.device)
                tokens_B[places] = self._tensors.choose(first + places, allowed_BV[places], params)
        return Chosen(tokens_B, logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1))

    def _mask_forbidden(self, first: int, logits_BV: Tensor) -> Tensor:
        """-inf for special tokens that neither end the text nor were asked for."""
        allowed_BV = logits_BV.index_fill(1, self._forbidden_ids, -math.inf)
        for number, row in enumerate(self._rows[first:]):
            if row.request.special_tokens:
                ids = list(row.request.special_tokens)
                allowed_BV[number, ids] = logits_BV[number, ids]
        return allowed_BV

    def _note_token(self, row: _Row, token: int, logits_BV: Tensor | None, number: int) -> None:
        if row.request.top_logprobs is not None and logits_BV is not None:
            row.logprobs += _token_logprobs(logits_BV[number : number + 1], [token], row.request.top_logprobs)

    def _add_token(self, number: int, token: int, *, ended: bool, full: bool) -> TextPiece:
        row = self._rows[number]
        if self._every_token or row.request.needs_every_token:
            tokens = [] if ended else [token]
        else:
            count = int(self._tensors.counts_R[number])
            tokens = self._tensors.tokens_RT[number, : count - ended].tolist()
        text = row.text.push(tokens)
        logprobs, row.logprobs = row.logprobs, []
        if not (ended or full or row.text.stopped):
            row.pieces.append(text)
            return TextPiece(row.request.index, text, None, logprobs)
        row.pieces.append(text + row.text.finish())
        count = int(self._tensors.counts_R[number])
        own_logprobs = self._tensors.logprobs_RT[number, :count].tolist()
        if any(math.isnan(logprob) for logprob in own_logprobs):
            raise Z2aError(NAN_LOGITS)
        completion = Completion(
            text="".join(row.pieces),
            tokens=self._tensors.tokens_RT[number, :count].tolist(),
            logprobs=own_logprobs,
            finish_reason="stop" if ended or row.text.stopped else "length",
            prompt_tokens=row.request.prompt_tokens,
        )
        self._remove_row(number)
        return TextPiece(row.request.index, row.pieces[-1], completion, logprobs)

    def _remove_row(self, number: int) -> None:
        last = len(self._rows) - 1
        if number < last:
            self._rows[number] = self._rows[last]
            self._tensors.move(last, number)
            self._cache.move(last, number)
        self._rows.pop()


def _token_logprobs(logits_SV: Tensor, tokens: Sequence[int], top: int | None) -> list[TokenLogprobs]:
    logprobs_SV = logits_SV.log_softmax(-1)
    own = logprobs_SV.gather(1, torch.tensor(tokens, device=logits_SV.device)[:, None])[:, 0].tolist()
    values, ids = logprobs_SV.topk(min(top or 0, logprobs_SV.shape[1]))
    likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprobs(token, logprob, best) for token, logprob, best in zip(tokens, own, likeliest, strict=True)]
