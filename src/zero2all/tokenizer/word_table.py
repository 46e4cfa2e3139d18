"""JIT kernels: a hash table from words to counts, in flat arrays of a size fixed in advance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from zero2all.tokenizer.jit import jit, jit_inline
from zero2all.tokenizer.pretokenizer import han_split_end, word_end

ROW_BYTES = 64  # memory for a row and its word, at the average word length that the table is sized for
WORD_BYTES = 16
ROW = np.dtype([("start", np.int64), ("count", np.int64)], align=True)


class WordTable(NamedTuple):
    """Row r is the word ``word_bytes[rows[r].start : rows[r + 1].start]`` and its count.

    A slot holds the first half of a word's hash and its row + 1, so that most lookups end there: memory is slow.
    """

    slots: NDArray[np.uint64]
    rows: NDArray[np.void]
    """Records of type ROW."""
    word_bytes: NDArray[np.uint8]
    size: NDArray[np.int64]
    """One element: the number of rows."""

    def words(self) -> pa.Array:
        """The words as an Arrow array over the table's own bytes."""
        size = int(self.size[0])
        starts = np.ascontiguousarray(self.rows["start"][: size + 1])
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(self.word_bytes)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), size, buffers)

    def counts(self) -> NDArray[np.int64]:
        return np.ascontiguousarray(self.rows["count"][: int(self.size[0])])


def new_table(rows: int, byte_capacity: int) -> WordTable:
    slots = 1 << (2 * rows - 1).bit_length()
    return WordTable(
        np.zeros(slots, np.uint64), np.zeros(rows + 1, ROW), np.empty(byte_capacity, np.uint8), np.zeros(1, np.int64)
    )


def small_table() -> WordTable:
    """A small table is fast because it fits into the caches; ``grow_table`` enlarges it."""
    return new_table(1 << 14, WORD_BYTES << 14)


def table_bytes(table: WordTable) -> int:
    return sum(array.nbytes for array in table)


def clear_table(table: WordTable) -> None:
    table.slots.fill(0)
    table.size[0] = 0


def grow_table(table: WordTable, byte_capacity: int = 0) -> WordTable:
    """The same words in a table of twice the size, or with a capacity of at least this many bytes."""
    larger = new_table(2 * (len(table.rows) - 1), max(2 * table.word_bytes.size, byte_capacity))
    size = int(table.size[0])
    add_rows(larger, table.word_bytes, np.ascontiguousarray(table.rows["start"][: size + 1]), table.counts(), 1, 0, 0)
    return larger


@jit
def mix_hash(value: np.uint64) -> np.uint64:
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@jit
def word_hash(data: NDArray[np.uint8], start: int, end: int) -> np.uint64:
    value = np.uint64(0xCBF29CE484222325)
    for pos in range(start, end):
        value = (value ^ np.uint64(data[pos])) * np.uint64(0x100000001B3)
    return mix_hash(value)


@jit_inline
def add_word(table: WordTable, data: NDArray[np.uint8], start: int, end: int, count: int) -> None:
    """The caller ensures capacity."""
    hashed = word_hash(data, start, end)
    half = np.uint64(32)
    last = np.uint64(table.slots.size - 1)
    slot = hashed & last
    length = end - start
    while table.slots[slot] != 0:
        found = table.slots[slot]
        if found >> half == hashed >> half:
            row = np.int64(found & np.uint64(0xFFFFFFFF)) - 1
            at = table.rows[row].start
            if table.rows[row + 1].start - at == length:
                same = 0
                while same < length and table.word_bytes[at + same] == data[start + same]:
                    same += 1
                if same == length:
                    table.rows[row].count += count
                    return
        slot = (slot + np.uint64(1)) & last
    row = table.size[0]
    table.slots[slot] = hashed >> half << half | np.uint64(row + 1)
    at = table.rows[row].start
    for offset in range(length):
        table.word_bytes[at + offset] = data[start + offset]
    table.rows[row].count = count
    table.rows[row + 1].start = at + length
    table.size[0] = row + 1


@jit_inline
def has_capacity(table: WordTable, words: int, byte_count: int) -> bool:
    size = table.size[0]
    return bool(size + words < len(table.rows) and table.rows[size].start + byte_count <= table.word_bytes.size)


def word_hashes(table: WordTable) -> NDArray[np.uint64]:
    hashes = np.empty(int(table.size[0]), np.uint64)
    fill_word_hashes(table, hashes)
    return hashes


@jit
def fill_word_hashes(table: WordTable, hashes: NDArray[np.uint64]) -> None:
    for row in range(hashes.size):
        hashes[row] = word_hash(table.word_bytes, table.rows[row].start, table.rows[row + 1].start)


@jit
def count_texts(
    table: WordTable,
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    selected: NDArray[np.bool_],
    classes: NDArray[np.uint8],
    family: int,
    max_digits: int,
    max_han_run: int,
    text_index: int,
    pos: int,
) -> tuple[int, int]:
    """Count the words of texts from ``text_index`` on, there from ``pos`` on; returns where the table became full."""
    while text_index < selected.size:
        pos = max(pos, bounds[text_index])
        end = bounds[text_index + 1] if selected[text_index] else pos
        while pos < end:
            stop = word_end(data, pos, end, classes, family, max_digits)
            # No Han character is shorter than three bytes.
            max_words = 1 + (stop - pos) // (3 * max_han_run) if max_han_run else 1
            if not has_capacity(table, max_words, stop - pos):
                return text_index, pos
            while pos < stop:
                word_stop = han_split_end(data, pos, stop, classes, max_han_run) if max_han_run else stop
                add_word(table, data, pos, word_stop, 1)
                pos = word_stop
        text_index += 1
        pos = 0
    return text_index, 0


@jit
def add_rows(
    table: WordTable,
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_passes: int,
    pass_index: int,
    row_index: int,
) -> int:
    """Add counted words that belong to this pass; returns where the table became full."""
    while row_index < bounds.size - 1:
        start, end = bounds[row_index], bounds[row_index + 1]
        if num_passes == 1 or (word_hash(data, start, end) >> np.uint64(32)) % np.uint64(num_passes) == np.uint64(
            pass_index
        ):
            if not has_capacity(table, 1, end - start):
                return row_index
            add_word(table, data, start, end, counts[row_index])
        row_index += 1
    return row_index


def word_uniforms(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """A uniform number in [0, 1) for each word that depends only on the word and the seed."""
    uniforms = np.empty(hashes.size, np.float64)
    fill_word_uniforms(hashes, seed, uniforms)
    return uniforms


@jit
def fill_word_uniforms(hashes: NDArray[np.uint64], seed: int, uniforms: NDArray[np.float64]) -> None:
    salt = mix_hash(np.uint64(seed) ^ np.uint64(0x9E3779B97F4A7C15))
    for row in range(hashes.size):
        uniforms[row] = np.float64(mix_hash(hashes[row] ^ salt) >> np.uint64(11)) * 2.0**-53
