"""Text to score: a stream of tokens, and the rows of it that a model reads.

Two ways to divide it. Packed sequences are what training reads: every token is a target once, with up to a sequence of
context. A sliding window reads each document alone, so that no token has less context than the rest of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from zero2all.base.errors import UsageError
from zero2all.tokens import TokenShard
from zero2all.tokens.conversation_rows import ConversationRows

Array = np.ndarray[Any, Any]
MIN_DOCUMENTS = 20  # below that, the standard error is computed over blocks if there are more of them
BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Packed:
    """Sequences of consecutive tokens, across documents."""

    seq_len: int
    document_mask: bool
    """Whether attention stays inside documents."""
    end_of_text_first: bool = True
    """Whether a document begins at the end-of-text token before it, or after that."""

    def __str__(self) -> str:
        across = "inside" if self.document_mask else "across"
        return f"packed sequences of {self.seq_len} tokens, attention {across} documents"


@dataclass(frozen=True)
class Windowed:
    """Each document alone, with a sliding window.

    Every token is scored once: in the first window, or with at least ``window - stride`` tokens before it.
    """

    window: int
    stride: int

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.window:
            raise UsageError(f"--stride must be between 1 and the window ({self.window}); it is {self.stride}")

    def __str__(self) -> str:
        return f"each document alone, in windows of {self.window} tokens with a stride of {self.stride}"


Scoring = Packed | Windowed


@dataclass(frozen=True)
class EvalText:
    """Text with a metric of its own."""

    name: str
    kind: Literal["source", "test set"]
    shards: Sequence[TokenShard]
    max_tokens: int | None = None
    """Score only the first tokens, in full sequences; by default everything."""
    answers_only: bool = False
    """In conversations, score only what the assistant writes, without rejected answers; in packed sequences, which then
    cut none."""


class Row(NamedTuple):
    """What the model reads at once: tokens [start, start + length) of a stream, to predict [start + 1, ...]."""

    start: int
    length: int
    first_scored: int
    """Targets before this one are only context."""


@dataclass(frozen=True)
class Stream:
    """Consecutive documents, each followed by the end-of-text token."""

    tokens: Array
    """int32 [N]."""
    units: Array
    """What each token belongs to: a document, or a block of few long ones; int32 [N]. Losses of units are independent
    of each other, or nearly so."""
    documents: int
    rows: list[Row]
    targets: range
    """The positions that count, also those without text."""
    mask: Array
    """Which tokens may be scored; bool [N]."""
    is_first: Array
    """Which tokens are the first that attention sees of a document, where it stays inside documents; bool [N]."""


def read_stream(text: EvalText, end_of_text: int, scoring: Scoring) -> Stream:
    """Everything that is scored of a text. Without a limit, that is all of it: the first token follows an end of text,
    and the last sequence is shorter."""
    if text.answers_only and isinstance(scoring, Packed):
        return _read_conversations(text, scoring.seq_len)
    limit = None if text.max_tokens is None else text.max_tokens + 1
    tokens, starts, is_cut = _read_tokens(text.shards, limit)
    is_whole = text.max_tokens is None or isinstance(scoring, Windowed)
    if is_whole:
        tokens, starts = np.concatenate([[end_of_text], tokens]).astype(np.int32), starts + 1
    if isinstance(scoring, Windowed):
        rows = list(_window_rows(len(tokens) + is_cut, starts, scoring))
        first = starts
    else:
        rows = list(_packed_rows(len(tokens), scoring.seq_len, is_whole=is_whole))
        first = starts - scoring.end_of_text_first
    is_first = np.zeros(len(tokens), dtype=bool)
    is_first[first[first >= 0]] = True
    targets = range(1, len(tokens) if is_whole else 1 + sum(row.length for row in rows))
    positions = np.arange(len(tokens))
    units = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
    documents = len(np.unique(units[targets.start : targets.stop]))
    if documents < MIN_DOCUMENTS and documents < len(tokens) // BLOCK_TOKENS:
        units = positions // BLOCK_TOKENS
    return Stream(tokens, units.astype(np.int32), documents, rows, targets, np.ones(len(tokens), dtype=bool), is_first)


def _read_conversations(text: EvalText, seq_len: int) -> Stream:
    """Rows of whole conversations, as training reads them."""
    packed = ConversationRows(list(text.shards), seq_len, only_desirable=True)
    count = len(packed) if text.max_tokens is None else min(len(packed), max(1, text.max_tokens // seq_len))
    width, documents = seq_len + 1, 0
    tokens, mask = np.zeros(count * width, dtype=np.int32), np.zeros(count * width, dtype=bool)
    units, is_first = np.zeros(count * width, dtype=np.int32), np.zeros(count * width, dtype=bool)
    for row in range(count):
        begin, whole = row * width, slice(row * width, (row + 1) * width)
        tokens[whole], mask[whole] = packed.read(row)
        is_first[whole] = packed.is_first(row)
        for document in packed.documents(row):
            units[begin : begin + document.tokens] = documents
            begin, documents = begin + document.tokens, documents + 1
        units[begin : (row + 1) * width] = documents - 1  # padding, which is not scored
    rows = [Row(row * width, seq_len, 0) for row in range(count)]
    return Stream(tokens, units, documents, rows, range(count * width), mask, is_first)


def _read_tokens(shards: Sequence[TokenShard], limit: int | None) -> tuple[Array, Array, bool]:
    """The first tokens of some shards, where documents start in them, and whether the limit cuts the last one."""
    parts, starts, count = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)], 0
    is_cut = False
    for shard in shards:
        if limit is not None and count >= limit:
            break
        stop = len(shard.tokens) if limit is None else limit - count
        parts.append(shard.read(0, stop).astype(np.int32))
        offsets = shard.document_offsets
        starts.append(offsets[offsets < len(parts[-1])] + count)
        is_cut = len(parts[-1]) not in offsets
        count += len(parts[-1])
    return np.concatenate(parts), np.concatenate(starts), is_cut


def _packed_rows(num_tokens: int, seq_len: int, *, is_whole: bool) -> Iterator[Row]:
    """Sequences that overlap by one token, so that every token but the first is a target once."""
    for start in range(0, num_tokens - 1, seq_len):
        length = min(seq_len, num_tokens - 1 - start)
        if length == seq_len or is_whole:
            yield Row(start, length, 0)


def _window_rows(stop: int, starts: Array, scoring: Windowed) -> Iterator[Row]:
    """The windows of each document, which starts with the end-of-text token before it.

    ``stop`` is where a document after the last one would start; one that a limit cuts has no end-of-text token.
    """
    for first, next_start in zip(starts.tolist(), [*starts[1:].tolist(), stop], strict=True):
        begin, end = first - 1, next_start - 2  # the last one is the last token of the text
        scored = begin
        while scored < end:
            stop = min(end, scored + scoring.window if scored == begin else scored + scoring.stride)
            start = max(begin, stop - scoring.window)
            yield Row(start, stop - start, scored - start)
            scored = stop
