"""Stage two of training: merges from counted words.

The merges equal the Hugging Face trainer's, ties included, with two differences that only show at scale: counts
have 64 bits (theirs have 32), and memory is a known multiple of the input words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from zero2all.tokenizer.pair_heap import grow_heap, new_heap
from zero2all.tokenizer.pair_index import (
    WORD,
    Words,
    apply_changes,
    build_word_lists,
    copy_pairs,
    count_pairs,
    merge_pair_in_words,
    new_changes,
    new_pair_table,
    pop_most_frequent,
    prune_lists,
    push_all,
    sum_by_bucket,
)
from zero2all.tokenizer.vocabulary import byte_alphabet
from zero2all.tokenizer.word_lists import NO_NODE, clear_word_lists, grow_word_lists, new_word_lists

MAX_INDEXED_PAIRS = 1 << 19  # approximate
SUM_BUCKETS = 1 << 22  # for sums of pairs
PROGRESS_EVERY = 64


class Merge(NamedTuple):
    """Two tokens that become one."""

    left: int
    right: int
    frequency: int
    """How often the pair occurred when it was merged."""


def merge_memory(words: int, symbols: int) -> int:
    """Memory that ``learn_merges`` needs for this many words with this many symbols in total, in bytes.

    A symbol takes at most 4 bytes and half a node of 8, with a quarter of headroom; a word has its offset, length and
    count; pairs, their sums and the heap have a fixed size.
    """
    return 24 * words + 9 * symbols + (200 << 20)


def read_words(path: Path, vocab_size: int) -> Words:
    """The words that ``word_count.aggregate_counts`` wrote, as symbols; ``vocab_size`` is the final one.

    Symbols are as small as it allows, so that more of them fit into a cache line.
    """
    ids = np.zeros(256, np.uint16 if vocab_size <= 1 << 16 else np.int32)
    ids[bytes_by_id()] = np.arange(256)
    with pa.OSFile(str(path)) as stream:
        file = pa.ipc.open_file(stream)
        batches = range(file.num_record_batches)
        sizes = [(batch.num_rows, *_bounds(batch)[[0, -1]]) for batch in map(file.get_batch, batches)]
        symbols = np.empty(sum(end - start for _, start, end in sizes), ids.dtype)
        words = Words(symbols, np.empty(sum(rows for rows, _, _ in sizes), WORD))
        row = symbol = 0
        for batch in map(file.get_batch, batches):
            bounds = _bounds(batch)
            rows, span = words.rows[row : row + batch.num_rows], slice(symbol, symbol + int(bounds[-1] - bounds[0]))
            data = np.frombuffer(batch.column("word").buffers()[2] or b"", np.uint8)
            symbols[span] = ids[data[bounds[0] : bounds[-1]]]
            rows["start"] = bounds[:-1] - bounds[0] + symbol
            rows["length"] = np.diff(bounds)
            rows["count"] = batch.column("count").to_numpy()
            row, symbol = row + batch.num_rows, span.stop
    return words


def _bounds(batch: pa.RecordBatch) -> NDArray[np.int64]:
    words = batch.column("word")
    return np.frombuffer(words.buffers()[1], np.int64)[words.offset : words.offset + len(words) + 1]


def bytes_by_id() -> list[int]:
    """The byte of each of the first 256 ids, in the order of the characters of the byte-level alphabet."""
    alphabet = byte_alphabet()
    return [alphabet[character] for character in sorted(alphabet)]


def learn_merges(
    words: Words,
    tokens: list[bytes],
    vocab_size: int,
    min_frequency: int,
    advance: Callable[[float], None] = lambda tokens: None,
) -> list[Merge]:
    """Merge the most frequent pair until there are ``vocab_size`` tokens, or no pair is frequent enough.

    ``words.symbols`` are ids of ``tokens``, to which the new ones are appended; the words are consumed.
    """
    index = PairIndex(words, vocab_size)
    ids = {token: id for id, token in enumerate(tokens)}
    merges: list[Merge] = []
    while len(tokens) < vocab_size:
        count, left, right, head = index.pop(min_frequency)
        if count < min_frequency:
            break
        # Two merges may make the same token in two ways: "a bc" and "ab c".
        token = tokens[left] + tokens[right]
        if is_new := token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
        merges.append(Merge(left, right, count))
        index.merge(left, right, ids[token], head, is_new=is_new)
        if len(merges) % PROGRESS_EVERY == 0:
            advance(PROGRESS_EVERY)
    return merges


class PairIndex:
    """The arrays of ``pair_index``, grown where needed; ``vocab_size`` is the final one."""

    def __init__(self, words: Words, vocab_size: int) -> None:
        self.words = words
        self.max_new_pairs = 2 * vocab_size  # pairs of one merge: either neighbour may be any token
        self.changes = new_changes(vocab_size)
        longest = int(words.rows["length"].max(initial=0))
        self.lists = new_word_lists(max(MAX_INDEXED_PAIRS, words.symbols.size // 2) + 2 * longest)
        self._build()

    def _build(self) -> None:
        """Index the most frequent pairs, as many as fit."""
        sums = np.zeros(min(SUM_BUCKETS, _power_of_two(2 * self.words.symbols.size + 2)), np.int64)
        sum_by_bucket(self.words, sums)
        self.floor = 1
        if sums.size > MAX_INDEXED_PAIRS:
            self.floor = max(1, int(np.partition(sums, -MAX_INDEXED_PAIRS)[-MAX_INDEXED_PAIRS]))
        self.pairs = new_pair_table(_power_of_two(2 * (min(MAX_INDEXED_PAIRS, sums.size) + self.max_new_pairs)))
        word = 0
        while (word := count_pairs(self.words, self.pairs, sums, self.floor, word)) < self.words.rows.size:
            self._resize_pair_table(2 * self.pairs.slots.size, floor=1)
        del sums
        self.floor = max(self.floor, self._floor_for_lists())
        self._drop_rare_pairs()
        clear_word_lists(self.lists)
        build_word_lists(self.words, self.pairs, self.lists)
        self.heap = new_heap(int(self.pairs.size[0]) + self.max_new_pairs)
        push_all(self.pairs, self.heap)

    def _floor_for_lists(self) -> int:
        """The lowest floor at which the lists leave a quarter of the nodes free."""
        counts, occurrences = self.pairs.slots["count"], self.pairs.slots["occurrences"]
        order = np.argsort(-counts, kind="stable")
        needed = np.cumsum(occurrences[order], dtype=np.int64)
        fitting = int(np.searchsorted(needed, self.lists.nodes.size * 3 // 4, "right"))
        if fitting == counts.size:
            return 1
        floor = min(int(counts[order[fitting]]) + 1, int(counts[order[0]]))
        # The most frequent pairs are always indexed, however many occurrences they have.
        capacity = 4 * int(occurrences[counts >= floor].sum(dtype=np.int64)) // 3 + 1
        if capacity > self.lists.nodes.size:
            self.lists = grow_word_lists(self.lists, capacity)
        return floor

    def pop(self, min_count: int) -> tuple[int, int, int, int]:
        """The pair to merge next, as (count, left, right, list); its count is below ``min_count`` if there is none."""
        while True:
            entry = pop_most_frequent(self.pairs, self.lists, self.heap, self.floor)
            if entry[0] or self.floor <= min_count:
                return entry
            self._build()

    def merge(self, left: int, right: int, new: int, head: int, *, is_new: bool) -> None:
        node = head
        while (node := merge_pair_in_words(self.words, self.lists, self.changes, left, right, new, node)) != NO_NODE:
            self._free_nodes()
        if (self.pairs.size[0] + self.max_new_pairs) * 4 > self.pairs.slots.size * 3:
            self._drop_rare_pairs()
        if self.heap.size[0] + self.max_new_pairs > self.heap.counts.size:
            self.heap = grow_heap(self.heap, self.heap.counts.size * 5 // 4 + self.max_new_pairs)
        apply_changes(self.pairs, self.lists, self.heap, self.changes, self.floor, left, right, new)
        if not is_new and self.floor > 1:
            self._build()  # pairs below the floor may have risen above it, and only a recount can tell

    def _free_nodes(self) -> None:
        prune_lists(self.words, self.lists, self.heap)
        if self.lists.num_free[0] * 8 < self.lists.nodes.size:
            self.lists = grow_word_lists(self.lists, self.lists.nodes.size * 5 // 4)

    def _drop_rare_pairs(self) -> None:
        """Rehash without the pairs below the floor, leaving room for the pairs of one merge."""
        frequent = int(np.count_nonzero(self.pairs.slots["count"] >= self.floor))
        self._resize_pair_table(_power_of_two(2 * (frequent + self.max_new_pairs)), self.floor)

    def _resize_pair_table(self, num_slots: int, floor: int) -> None:
        """Rehash into a table of this size, without the pairs below the floor."""
        copy = new_pair_table(num_slots)
        copy_pairs(self.pairs, copy, floor)
        self.pairs = copy


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
