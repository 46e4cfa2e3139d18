"""Rows of whole conversations: none is cut, and only what the assistant writes is a target."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

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


class ConversationRows:
    """The conversations of a source in rows of ``seq_len`` + 1 tokens, the last one only as a target.

    With ``packing`` a row holds as many as fit, by best fit decreasing; else one. What is left of a row is filled with
    end-of-text tokens, which are no targets. The rows depend on the store and on ``seq_len`` alone.
    """

    def __init__(self, shards: list[TokenShard], seq_len: int, packing: bool = True) -> None:
        self.shards, self.seq_len = shards, seq_len
        lengths = [np.diff(shard.document_offsets) for shard in shards]
        answers = [_count_generated(shard) for shard in shards]
        self._first_documents = np.cumsum([0, *map(len, lengths)])
        self._lengths = np.concatenate([np.empty(0, dtype=np.int64), *lengths])
        counts = np.concatenate([np.empty(0, dtype=np.int64), *answers])
        fits, answered = self._lengths <= seq_len + 1, counts > 0
        self.left_out = LeftOut(int((~fits & answered).sum()), int((~answered).sum()))
        used = np.flatnonzero(fits & answered)
        if packing:
            order, self._row_starts = best_fit_decreasing(self._lengths[used], seq_len + 1)
        else:
            order, self._row_starts = np.arange(len(used)), np.arange(len(used) + 1)
        self._documents = used[order]
        self._targets = counts

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    @property
    def num_conversations(self) -> int:
        return len(self._documents)

    @property
    def num_targets(self) -> int:
        return int(self._targets[self._documents].sum())

    @property
    def fill(self) -> float:
        """The share of positions with a token of a conversation."""
        return float(self._lengths[self._documents].sum() / max(1, len(self) * (self.seq_len + 1)))

    def read(self, row: int) -> tuple[Array, Array]:
        """The tokens of a row as int64 [seq_len + 1], and which of them are targets."""
        tokens = np.empty(self.seq_len + 1, dtype=np.int64)
        mask = np.zeros(self.seq_len + 1, dtype=bool)
        begin = 0
        for document in self.documents(row):
            first = int(document.shard.document_offsets[document.number])
            end = begin + document.tokens
            tokens[begin:end] = document.shard.read(first, first + document.tokens)
            mask[begin:end] = document.shard.read_mask(first, first + document.tokens)
            mask[begin] = False  # what is before it is another conversation, or nothing
            begin = end
        tokens[begin:] = tokens[begin - 1]  # the end-of-text token, which every document ends with
        return tokens, mask

    def documents(self, row: int) -> list[RowDocument]:
        found = []
        for document in self._documents[self._row_starts[row] : self._row_starts[row + 1]].tolist():
            number = int(np.searchsorted(self._first_documents, document, side="right")) - 1
            inside = document - int(self._first_documents[number])
            found.append(RowDocument(self.shards[number], inside, int(self._lengths[document])))
        return found

    def count_targets(self, row: int) -> int:
        """Targets of a row, as ``read`` marks them."""
        return int(self._targets[self._documents[self._row_starts[row] : self._row_starts[row + 1]]].sum())


def _count_generated(shard: TokenShard) -> Array:
    """Tokens that the assistant writes, for each document, without its first one."""
    starts = shard.document_offsets[:-1]
    if not len(starts):
        return np.empty(0, dtype=np.int64)
    mask = shard.read_mask(0, int(shard.document_offsets[-1]))
    counts: Array = np.add.reduceat(mask.astype(np.int64), starts)
    return counts - mask[starts]


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
