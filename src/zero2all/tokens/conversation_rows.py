"""Rows of whole conversations: none is cut, and only what the assistant writes is a target."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero2all.tokens.chat_documents import UNDESIRABLE
from zero2all.tokens.token_store import Array, TokenShard


@dataclass(frozen=True)
class LeftOut:
    """Conversations of a source that are not trained on."""

    too_long: int
    """Longer than a row."""
    without_answer: int
    """Without a token that the assistant writes, or the chat template does not tell which."""


@dataclass(frozen=True)
class RowDocument:
    """A conversation in a row."""

    shard: TokenShard
    number: int
    """In the shard."""
    tokens: int


@dataclass(frozen=True)
class RowCompletions:
    """The completions in a row, for objectives that compare them."""

    segments: Array
    """int64 [seq_len + 1]: 1 + the number of the completion that a token is a target of; 0 where it is no target."""
    documents: list[int]
    """The document of each completion, counted over all shards of the source."""
    lengths: list[int]
    """Targets of each completion."""
    desirable: list[bool]


class CompletionCounts(NamedTuple):
    examples: int
    """Conversations, or pairs of them."""
    desirable_targets: int


class ConversationRows:
    """The conversations of a source in rows of ``seq_len`` + 1 tokens, the last one only as a target.

    With ``packing`` a row holds as many as fit, by best fit decreasing; else one. What is left of a row is filled with
    end-of-text tokens, which are no targets. The rows depend on the store and on ``seq_len`` alone.

    ``per_example`` consecutive documents, such as the two of a pair, are in the same row. With ``only_desirable``
    conversations with a rejected completion are left out, uncounted.
    """

    def __init__(
        self,
        shards: list[TokenShard],
        seq_len: int,
        *,
        packing: bool = True,
        per_example: int = 1,
        only_desirable: bool = False,
    ) -> None:
        self.shards, self.seq_len, self.per_example = shards, seq_len, per_example
        of_shards = [_DocumentColumns.read(shard) for shard in shards]
        self._first_documents = np.cumsum([0, *(len(columns.lengths) for columns in of_shards)])
        # Over all documents of the source, left-out ones too: tokens, targets, no rejected completion.
        self.document_lengths = _concatenate([columns.lengths for columns in of_shards])
        self.document_targets = _concatenate([columns.targets for columns in of_shards])
        self.document_desirable: Array = _concatenate([columns.rejected for columns in of_shards]) == 0
        # One row an example; a last document without its pair cannot be there.
        lengths = self.document_lengths.reshape(-1, per_example).sum(1)
        fits, answered = lengths <= seq_len + 1, (self.document_targets.reshape(-1, per_example) > 0).all(1)
        wanted = (self.document_desirable | (not only_desirable)).reshape(-1, per_example).all(1)
        self.left_out = LeftOut(int((~fits & answered & wanted).sum()), int((~answered & wanted).sum()))
        used = np.flatnonzero(fits & answered & wanted)
        if packing:
            order, row_starts = best_fit_decreasing(lengths[used], seq_len + 1)
        else:
            order, row_starts = np.arange(len(used)), np.arange(len(used) + 1)
        members = used[order][:, None] * per_example + np.arange(per_example)
        self._documents, self._row_starts = members.reshape(-1), row_starts * per_example

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    @property
    def num_examples(self) -> int:
        """Conversations, or pairs of them."""
        return len(self._documents) // self.per_example

    @property
    def num_targets(self) -> int:
        return int(self.document_targets[self._documents].sum())

    @property
    def fill(self) -> float:
        """The share of positions with a token of a conversation."""
        return float(self.document_lengths[self._documents].sum() / max(1, len(self) * (self.seq_len + 1)))

    def read(self, row: int) -> tuple[Array, Array]:
        """The tokens of a row as int64 [seq_len + 1], and which of them are targets."""
        tokens = np.empty(self.seq_len + 1, dtype=np.int64)
        mask = np.zeros(self.seq_len + 1, dtype=bool)
        begin = 0
        for number in self._members(row).tolist():
            end = begin + int(self.document_lengths[number])
            tokens[begin:end], mask[begin:end] = self.read_document(number)
            begin = end
        tokens[begin:] = tokens[begin - 1]  # the end-of-text token, which every document ends with
        return tokens, mask

    def is_first(self, row: int) -> Array:
        """Which tokens of a row are the first of a conversation; each token of the padding stands alone."""
        ends = np.cumsum(self.document_lengths[self._members(row)])
        found = np.zeros(self.seq_len + 1, dtype=bool)
        found[ends[:-1]] = True
        found[ends[-1] :] = True
        return found

    def read_document(self, number: int) -> tuple[Array, Array]:
        """The tokens of a document, counted over all shards, and which of them are targets."""
        document = self._document(number)
        first = int(document.shard.document_offsets[document.number])
        tokens = document.shard.read(first, first + document.tokens)
        mask = document.shard.read_mask(first, first + document.tokens)
        mask[0] = False  # nothing is before it, or another conversation
        return tokens, mask

    def documents(self, row: int) -> list[RowDocument]:
        return [self._document(number) for number in self._members(row).tolist()]

    def _document(self, number: int) -> RowDocument:
        shard = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        first, tokens = int(self._first_documents[shard]), int(self.document_lengths[number])
        return RowDocument(self.shards[shard], number - first, tokens)

    def completions(self, row: int) -> RowCompletions:
        mask, members = self.read(row)[1], self._members(row)
        numbers = np.repeat(np.arange(1, len(members) + 1), self.document_lengths[members])
        segments = np.pad(numbers, (0, self.seq_len + 1 - len(numbers))) * mask
        lengths, desirable = self.document_targets[members].tolist(), self.document_desirable[members].tolist()
        return RowCompletions(segments, members.tolist(), lengths, desirable)

    @property
    def used_documents(self) -> Array:
        """The documents that are in a row, in their order."""
        return np.sort(self._documents)

    def row_documents(self, row: int) -> list[int]:
        """The documents of a row, counted over all shards."""
        found: list[int] = self._members(row).tolist()
        return found

    def count_targets(self, row: int) -> int:
        """Targets of a row, as ``read`` marks them."""
        return int(self.document_targets[self._members(row)].sum())

    def count_completions(self, row: int) -> CompletionCounts:
        members = self._members(row)
        desirable = int(self.document_targets[members][self.document_desirable[members]].sum())
        return CompletionCounts(len(members) // self.per_example, desirable)

    def _members(self, row: int) -> Array:
        members: Array = self._documents[self._row_starts[row] : self._row_starts[row + 1]]
        return members


@dataclass(frozen=True)
class _DocumentColumns:
    """A number for each document of a shard."""

    lengths: Array
    targets: Array
    """Tokens that the assistant writes, without the first token of the document."""
    rejected: Array
    """Targets that belong to a rejected completion."""

    @classmethod
    def read(cls, shard: TokenShard) -> _DocumentColumns:
        starts, lengths = shard.document_offsets[:-1], np.diff(shard.document_offsets)
        if not len(starts):
            return cls(*(np.empty(0, dtype=np.int64) for _ in range(3)))
        labels = shard.read_labels(0, int(shard.document_offsets[-1]))
        targets = np.add.reduceat((labels > 0).astype(np.int64), starts) - (labels[starts] > 0)
        return cls(lengths, targets, np.add.reduceat((labels == UNDESIRABLE).astype(np.int64), starts))


def _concatenate(parts: list[Array]) -> Array:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def best_fit_decreasing(lengths: Array, capacity: int) -> tuple[Array, Array]:
    """Items in bins: the items of all bins one after the other, and where each bin begins, and the last one ends.

    >>> items, starts = best_fit_decreasing(np.array([3, 5, 2, 6]), capacity=8)
    >>> [items[begin:end].tolist() for begin, end in zip(starts, starts[1:])]
    [[2, 3], [0, 1]]
    """
    spaces: list[int] = []  # free tokens of bins, each value once, sorted
    bins_by_space: dict[int, list[int]] = {}
    bin_of_item = np.empty(len(lengths), dtype=np.int64)
    bins = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            number, space, bins = bins, capacity, bins + 1
        else:
            space = spaces[place]
            number = bins_by_space[space].pop()
            if not bins_by_space[space]:
                del bins_by_space[space], spaces[place]
        bin_of_item[item] = number
        left = space - length
        if left and left not in bins_by_space:
            insort(spaces, left)
            bins_by_space[left] = []
        if left:
            bins_by_space[left].append(number)
    items = np.argsort(bin_of_item, kind="stable")
    return items, np.searchsorted(bin_of_item[items], np.arange(bins + 1))
