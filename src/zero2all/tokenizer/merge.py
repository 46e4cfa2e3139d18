"""Stage two of training: merges from counted words.

The merges are those of the Hugging Face trainer, one by one and ties included, with two differences that only show at
scale: counts have 64 bits (theirs have 32), and memory is a known multiple of the words that come in.
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

MOST_PAIRS = 1 << 19  # in the index, about
PLACES = 1 << 22  # for sums of pairs
SHOW_EVERY = 64


def merge_memory(words: int, letters: int) -> int:
    """What ``learn_merges`` takes for so many words of so many letters.

    A letter is a symbol of at most 4 bytes and half a node of 8, with a quarter to spare; a word has its place, length
    and count; pairs, their sums and the heap have a size of their own.
    """
    return 24 * words + 9 * letters + (200 << 20)


def read_words(path: Path, size: int) -> Words:
    """The words that ``count.collect`` wrote, as symbols; ``size`` is that of the final vocabulary.

    Symbols are as small as it allows: more of them come with each visit to memory.
    """
    from zero2all.tokenizer.pair_index import COUNT, LENGTH, START, Words

    ids = np.zeros(256, np.uint16 if size <= 1 << 16 else np.int32)
    ids[byte_order()] = np.arange(256)
    with pa.OSFile(str(path)) as stream:
        file = pa.ipc.open_file(stream)
        batches = range(file.num_record_batches)
        sizes = [(batch.num_rows, *_bounds(batch)[[0, -1]]) for batch in map(file.get_batch, batches)]
        total = sum(rows for rows, _, _ in sizes)
        symbols = np.empty(sum(end - start for _, start, end in sizes), ids.dtype)
        words = Words(symbols, np.empty((total, 3), np.int64))
        row = letter = 0
        for batch in map(file.get_batch, batches):
            bounds = _bounds(batch)
            rows, letters = slice(row, row + batch.num_rows), slice(letter, letter + int(bounds[-1] - bounds[0]))
            data = np.frombuffer(batch.column("word").buffers()[2] or b"", np.uint8)
            symbols[letters] = ids[data[bounds[0] : bounds[-1]]]
            words.rows[rows, START] = bounds[:-1] - bounds[0] + letter
            words.rows[rows, LENGTH] = np.diff(bounds)
            words.rows[rows, COUNT] = batch.column("count").to_numpy()
            row, letter = rows.stop, letters.stop
    return words


def _bounds(batch: pa.RecordBatch) -> NDArray[np.int64]:
    words = batch.column("word")
    return np.frombuffer(words.buffers()[1], np.int64)[words.offset : words.offset + len(words) + 1]


def byte_order() -> list[int]:
    """The byte that each of the first 256 ids stands for: in the order of the characters that bytes are written as."""
    alphabet = byte_alphabet()
    return [alphabet[character] for character in sorted(alphabet)]


def learn_merges(
    words: Words,
    tokens: list[bytes],
    size: int,
    min_frequency: int,
    advance: Callable[[float], None] = lambda tokens: None,
) -> list[tuple[int, int]]:
    """Merge the most frequent pair until there are ``size`` tokens, or no pair is frequent enough.

    ``words.symbols`` are ids of ``tokens``, to which the new ones are added; the words are used up.
    """
    index = PairIndex(words, size)
    ids = {token: id for id, token in enumerate(tokens)}
    merges: list[tuple[int, int]] = []
    while len(tokens) < size:
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
        if len(merges) % SHOW_EVERY == 0:
            advance(SHOW_EVERY)
    return merges


class PairIndex:
    """The arrays of ``pair_index``, made larger where that is needed; ``size`` is that of the final vocabulary."""

    def __init__(self, words: Words, size: int) -> None:
        from zero2all.tokenizer import pair_index

        self._compiled = pair_index
        self.words = words
        self.most_new = 2 * size  # pairs of one merge: either neighbour may be any token
        self.changes = pair_index.new_changes(size)
        nodes = max(MOST_PAIRS, words.symbols.size // 2) + 2 * int(words.rows[:, pair_index.LENGTH].max(initial=0))
        self.nodes = np.empty((nodes, 2), np.int32)
        self.sizes = np.zeros(5, np.int64)
        self._make()

    def _make(self) -> None:
        """Index the most frequent pairs, as many as there is room for."""
        c, words, sizes = self._compiled, self.words, self.sizes
        sizes[:] = 0
        sizes[c.FREE] = c.NOTHING
        sums = np.zeros(min(PLACES, _power_of_two(2 * words.symbols.size + 2)), np.int64)
        c.sum_by_place(words, sums)
        self.floor = 1 if sums.size <= MOST_PAIRS else max(1, int(np.partition(sums, -MOST_PAIRS)[-MOST_PAIRS]))
        self.pairs = c.new_pairs(_power_of_two(2 * (min(MOST_PAIRS, sums.size) + self.most_new)))
        counted = 0
        while (counted := c.count_pairs(words, self.pairs, sizes, sums, self.floor, counted)) < len(words.rows):
            self._copy_pairs(2 * len(self.pairs), floor=1)
        del sums
        self.floor = max(self.floor, self._floor_for_nodes())
        self._copy_pairs(
            _power_of_two(2 * (int(np.count_nonzero(self.pairs[:, c.TIMES] >= self.floor)) + self.most_new)), self.floor
        )
        c.list_words(words, self.pairs, self.nodes, sizes)
        waiting = int(sizes[c.PAIRS]) + self.most_new
        self.heap = c.Heap(np.empty(waiting, np.int64), *(np.empty(waiting, np.int32) for _ in range(3)))
        c.push_all(self.pairs, self.heap, sizes)

    def _floor_for_nodes(self) -> int:
        """The lowest floor at which the lists leave a quarter of the nodes free."""
        counts, places = self.pairs[:, self._compiled.TIMES], self.pairs[:, self._compiled.LISTED]
        order = np.argsort(-counts, kind="stable")
        needed = np.cumsum(places[order], dtype=np.int64)
        fitting = int(np.searchsorted(needed, len(self.nodes) * 3 // 4, "right"))
        if fitting == counts.size:
            return 1
        floor = min(int(counts[order[fitting]]) + 1, int(counts[order[0]]))
        # The pairs at the top always go in, however many places they share.
        self._grow_nodes(4 * int(places[counts >= floor].sum(dtype=np.int64)) // 3 + 1)
        return floor

    def pop(self, least: int) -> tuple[int, int, int, int]:
        """The pair to merge next, as (count, left, right, list); its count is below ``least`` if there is none."""
        while True:
            found = self._compiled.pop(self.pairs, self.nodes, self.heap, self.sizes, self.floor)
            if found[0] or self.floor <= least:
                return found
            self._make()

    def merge(self, left: int, right: int, new: int, node: int, is_new: bool) -> None:
        c, sizes = self._compiled, self.sizes
        while (node := c.merge_words(self.words, self.nodes, sizes, self.changes, left, right, new, node)) != c.NOTHING:
            c.prune(self.words, self.nodes, self.heap, sizes)
            if sizes[c.FREED] * 8 < len(self.nodes):
                self._grow_nodes(len(self.nodes) * 5 // 4)
        if (sizes[c.PAIRS] + self.most_new) * 4 > len(self.pairs) * 3:
            live = int(np.count_nonzero(self.pairs[:, c.TIMES] >= self.floor))
            self._copy_pairs(_power_of_two(2 * (live + self.most_new)), self.floor)
        if sizes[c.WAITING] + self.most_new > self.heap.counts.size:
            self.heap = c.Heap(*(np.resize(array, array.size * 5 // 4 + self.most_new) for array in self.heap))
        c.apply_changes(self.pairs, self.nodes, self.heap, sizes, self.changes, self.floor, left, right, new)
        if not is_new and self.floor > 1:
            self._make()  # pairs below the floor may have risen above it, and only a new count can tell

    def _copy_pairs(self, slots: int, floor: int) -> None:
        """To a table of this size, without what is below the floor."""
        copy = self._compiled.new_pairs(slots)
        self._compiled.copy_pairs(self.pairs, copy, self.sizes, floor)
        self.pairs = copy

    def _grow_nodes(self, size: int) -> None:
        if size > len(self.nodes):
            self.nodes = np.resize(self.nodes, (size, 2))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
