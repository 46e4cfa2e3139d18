"""Stage two of training: merges from counted words.

The merges equal those of the Hugging Face trainer, ties included, with two differences that only show at scale: counts
have 64 bits (theirs have 32), and memory is a known multiple of the input words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zero2all.tokenizer.vocabulary import byte_alphabet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zero2all.tokenizer.pair_index import Words

MAX_INDEXED_PAIRS = 1 << 19  # approximate
SUM_BUCKETS = 1 << 22  # for sums of pairs
PROGRESS_EVERY = 64


def merge_memory(words: int, symbols: int) -> int:
    """Memory that ``learn_merges`` needs for this many words with this many symbols in total, in bytes.

    A symbol takes at most 4 bytes and half a node of 8, with a quarter of headroom; a word has its offset, length and
    count; pairs, their sums and the heap have a fixed size.
    """
    return 24 * words + 9 * symbols + (200 << 20)


def read_words(path: Path, vocab_size: int) -> Words:
    """The words that ``word_count.aggregate_counts`` wrote, as symbols; ``vocab_size`` is that of the final vocabulary.

    Symbols are as small as it allows, so that more of them fit into a cache line.
    """
    from zero2all.tokenizer.pair_index import WORD_COUNT, WORD_LENGTH, WORD_START, Words

    ids = np.zeros(256, np.uint16 if vocab_size <= 1 << 16 else np.int32)
    ids[bytes_by_id()] = np.arange(256)
    with pa.OSFile(str(path)) as stream:
        file = pa.ipc.open_file(stream)
        batches = range(file.num_record_batches)
        sizes = [(batch.num_rows, *_bounds(batch)[[0, -1]]) for batch in map(file.get_batch, batches)]
        total = sum(rows for rows, _, _ in sizes)
        symbols = np.empty(sum(end - start for _, start, end in sizes), ids.dtype)
        words = Words(symbols, np.empty((total, 3), np.int64))
        row = symbol = 0
        for batch in map(file.get_batch, batches):
            bounds = _bounds(batch)
            rows, span = slice(row, row + batch.num_rows), slice(symbol, symbol + int(bounds[-1] - bounds[0]))
            data = np.frombuffer(batch.column("word").buffers()[2] or b"", np.uint8)
            symbols[span] = ids[data[bounds[0] : bounds[-1]]]
            words.rows[rows, WORD_START] = bounds[:-1] - bounds[0] + symbol
            words.rows[rows, WORD_LENGTH] = np.diff(bounds)
            words.rows[rows, WORD_COUNT] = batch.column("count").to_numpy()
            row, symbol = rows.stop, span.stop
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
) -> list[tuple[int, int]]:
    """Merge the most frequent pair until there are ``vocab_size`` tokens, or no pair is frequent enough.

    ``words.symbols`` are ids of ``tokens``, to which the new ones are appended; the words are consumed.
    """
    index = PairIndex(words, vocab_size)
    ids = {token: id for id, token in enumerate(tokens)}
    merges: list[tuple[int, int]] = []
    while len(tokens) < vocab_size:
        count, left, right, node = index.pop(min_frequency)
        if count < min_frequency:
            break
        # Two merges may make the same token in two ways: "a bc" and "ab c".
        token = tokens[left] + tokens[right]
        if is_new := token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
        merges.append((left, right))
        index.merge(left, right, ids[token], node, is_new)
        if len(merges) % PROGRESS_EVERY == 0:
            advance(PROGRESS_EVERY)
    return merges


class PairIndex:
    """The arrays of ``pair_index``, grown where needed; ``vocab_size`` is that of the final vocabulary."""

    def __init__(self, words: Words, vocab_size: int) -> None:
        from zero2all.tokenizer import pair_index

        self._kernels = pair_index
        self.words = words
        self.max_new_pairs = 2 * vocab_size  # pairs of one merge: either neighbour may be any token
        self.changes = pair_index.new_changes(vocab_size)
        nodes = max(MAX_INDEXED_PAIRS, words.symbols.size // 2) + 2 * int(
            words.rows[:, pair_index.WORD_LENGTH].max(initial=0)
        )
        self.nodes = np.empty((nodes, 2), np.int32)
        self.counters = np.zeros(5, np.int64)
        self._build()

    def _build(self) -> None:
        """Index the most frequent pairs, as many as fit."""
        kernels, words, sizes = self._kernels, self.words, self.counters
        sizes[:] = 0
        sizes[kernels.FREE_HEAD] = kernels.NO_NODE
        sums = np.zeros(min(SUM_BUCKETS, _power_of_two(2 * words.symbols.size + 2)), np.int64)
        kernels.sum_by_bucket(words, sums)
        self.floor = (
            1
            if sums.size <= MAX_INDEXED_PAIRS
            else max(1, int(np.partition(sums, -MAX_INDEXED_PAIRS)[-MAX_INDEXED_PAIRS]))
        )
        self.pairs = kernels.new_pairs(_power_of_two(2 * (min(MAX_INDEXED_PAIRS, sums.size) + self.max_new_pairs)))
        counted = 0
        while (counted := kernels.count_pairs(words, self.pairs, sizes, sums, self.floor, counted)) < len(words.rows):
            self._copy_pairs(2 * len(self.pairs), floor=1)
        del sums
        self.floor = max(self.floor, self._floor_for_nodes())
        self._copy_pairs(
            _power_of_two(
                2 * (int(np.count_nonzero(self.pairs[:, kernels.PAIR_COUNT] >= self.floor)) + self.max_new_pairs)
            ),
            self.floor,
        )
        kernels.build_word_lists(words, self.pairs, self.nodes, sizes)
        waiting = int(sizes[kernels.NUM_PAIRS]) + self.max_new_pairs
        self.heap = kernels.PairHeap(np.empty(waiting, np.int64), *(np.empty(waiting, np.int32) for _ in range(3)))
        kernels.heap_push_all(self.pairs, self.heap, sizes)

    def _floor_for_nodes(self) -> int:
        """The lowest floor at which the lists leave a quarter of the nodes free."""
        counts, occurrences = self.pairs[:, self._kernels.PAIR_COUNT], self.pairs[:, self._kernels.PAIR_LIST]
        order = np.argsort(-counts, kind="stable")
        needed = np.cumsum(occurrences[order], dtype=np.int64)
        fitting = int(np.searchsorted(needed, len(self.nodes) * 3 // 4, "right"))
        if fitting == counts.size:
            return 1
        floor = min(int(counts[order[fitting]]) + 1, int(counts[order[0]]))
        # The most frequent pairs are always indexed, however many occurrences they have.
        self._grow_nodes(4 * int(occurrences[counts >= floor].sum(dtype=np.int64)) // 3 + 1)
        return floor

    def pop(self, min_count: int) -> tuple[int, int, int, int]:
        """The pair to merge next, as (count, left, right, list); its count is below ``min_count`` if there is none."""
        while True:
            entry = self._kernels.pop_most_frequent(self.pairs, self.nodes, self.heap, self.counters, self.floor)
            if entry[0] or self.floor <= min_count:
                return entry
            self._build()

    def merge(self, left: int, right: int, new: int, node: int, is_new: bool) -> None:
        kernels, sizes = self._kernels, self.counters
        while (
            node := kernels.merge_pair_in_words(self.words, self.nodes, sizes, self.changes, left, right, new, node)
        ) != kernels.NO_NODE:
            kernels.prune_lists(self.words, self.nodes, self.heap, sizes)
            if sizes[kernels.NUM_FREE] * 8 < len(self.nodes):
                self._grow_nodes(len(self.nodes) * 5 // 4)
        if (sizes[kernels.NUM_PAIRS] + self.max_new_pairs) * 4 > len(self.pairs) * 3:
            live = int(np.count_nonzero(self.pairs[:, kernels.PAIR_COUNT] >= self.floor))
            self._copy_pairs(_power_of_two(2 * (live + self.max_new_pairs)), self.floor)
        if sizes[kernels.HEAP_SIZE] + self.max_new_pairs > self.heap.counts.size:
            self.heap = kernels.PairHeap(
                *(np.resize(array, array.size * 5 // 4 + self.max_new_pairs) for array in self.heap)
            )
        kernels.apply_changes(self.pairs, self.nodes, self.heap, sizes, self.changes, self.floor, left, right, new)
        if not is_new and self.floor > 1:
            self._build()  # pairs below the floor may have risen above it, and only a recount can tell

    def _copy_pairs(self, slots: int, floor: int) -> None:
        """Rehash into a table of this size, without the pairs below the floor."""
        copy = self._kernels.new_pairs(slots)
        self._kernels.copy_pairs(self.pairs, copy, self.counters, floor)
        self.pairs = copy

    def _grow_nodes(self, size: int) -> None:
        if size > len(self.nodes):
            self.nodes = np.resize(self.nodes, (size, 2))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
