"""Compiled: a hash table from words to counts, in flat arrays whose size is known before the first word comes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from zero2all.tokenizer.compiled import compiled, inlined
from zero2all.tokenizer.cut import chop_end, word_end

ROW_BYTES = 64  # of memory for a row and its word, at the average length that the table is made for
WORD_BYTES = 16
START, COUNT = range(2)  # columns of ``Table.rows``


class Table(NamedTuple):
    """Row r is the word ``letters[rows[r, START]:rows[r + 1, START]]``; ``size[0]`` says how many there are.

    A slot holds the first half of a word's hash and its row + 1, so that most looks end there: memory is slow.
    """

    slots: NDArray[np.uint64]
    rows: NDArray[np.int64]
    letters: NDArray[np.uint8]
    size: NDArray[np.int64]

    def words(self) -> pa.Array:
        """The words as an Arrow array over the table's own letters."""
        size = int(self.size[0])
        starts = np.ascontiguousarray(self.rows[: size + 1, START])
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(self.letters)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), size, buffers)

    def counts(self) -> NDArray[np.int64]:
        return np.ascontiguousarray(self.rows[: int(self.size[0]), COUNT])


def new_table(rows: int, letters: int) -> Table:
    slots = 1 << (2 * rows - 1).bit_length()
    return Table(
        np.zeros(slots, np.uint64),
        np.zeros((rows + 1, 2), np.int64),
        np.empty(letters, np.uint8),
        np.zeros(1, np.int64),
    )


def small_table() -> Table:
    """A small one is quick, because it stays in the caches; ``grown`` makes it larger."""
    return new_table(1 << 14, WORD_BYTES << 14)


def memory_of(table: Table) -> int:
    return sum(array.nbytes for array in table)


def clear(table: Table) -> None:
    table.slots.fill(0)
    table.size[0] = 0


def grown(table: Table, letters: int = 0) -> Table:
    """The same words in a table of twice the size, or with room for at least this many letters."""
    larger = new_table(2 * (len(table.rows) - 1), max(2 * table.letters.size, letters))
    size = int(table.size[0])
    add_rows(larger, table.letters, table.rows[: size + 1, START].copy(), table.counts(), 1, 0, 0)
    return larger


@compiled
def mixed(value: np.uint64) -> np.uint64:
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@compiled
def word_hash(data: NDArray[np.uint8], start: int, end: int) -> np.uint64:
    value = np.uint64(0xCBF29CE484222325)
    for at in range(start, end):
        value = (value ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
    return mixed(value)


@inlined
def add_word(table: Table, data: NDArray[np.uint8], start: int, end: int, count: int) -> None:
    """The caller has seen to it that there is room."""
    hashed = word_hash(data, start, end)
    half = np.uint64(32)
    last = np.uint64(table.slots.size - 1)
    slot = hashed & last
    length = end - start
    while table.slots[slot] != 0:
        found = table.slots[slot]
        if found >> half == hashed >> half:
            row = np.int64(found & np.uint64(0xFFFFFFFF)) - 1
            at = table.rows[row, START]
            if table.rows[row + 1, START] - at == length:
                same = 0
                while same < length and table.letters[at + same] == data[start + same]:
                    same += 1
                if same == length:
                    table.rows[row, COUNT] += count
                    return
        slot = (slot + np.uint64(1)) & last
    row = table.size[0]
    table.slots[slot] = hashed >> half << half | np.uint64(row + 1)
    at = table.rows[row, START]
    for offset in range(length):
        table.letters[at + offset] = data[start + offset]
    table.rows[row, COUNT] = count
    table.rows[row + 1, START] = at + length
    table.size[0] = row + 1


@inlined
def has_room(table: Table, words: int, letters: int) -> bool:
    size = table.size[0]
    return bool(size + words < len(table.rows) and table.rows[size, START] + letters <= table.letters.size)


@compiled
def word_hashes(table: Table) -> NDArray[np.uint64]:
    hashes = np.empty(table.size[0], np.uint64)
    for row in range(hashes.size):
        hashes[row] = word_hash(table.letters, table.rows[row, START], table.rows[row + 1, START])
    return hashes


@compiled
def count_texts(
    table: Table,
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    taken: NDArray[np.bool_],
    classes: NDArray[np.uint8],
    family: int,
    digits: int,
    chop: int,
    number: int,
    at: int,
) -> tuple[int, int]:
    """Count the words of texts from ``number`` on, there from ``at`` on; gives where the table became full."""
    while number < taken.size:
        at = max(at, bounds[number])
        end = bounds[number + 1] if taken[number] else at
        while at < end:
            stop = word_end(data, at, end, classes, family, digits)
            pieces = 1 + (stop - at) // (3 * chop) if chop else 1  # no Han character is shorter than three bytes
            if not has_room(table, pieces, stop - at):
                return number, at
            while at < stop:
                piece = chop_end(data, at, stop, classes, chop) if chop else stop
                add_word(table, data, at, piece, 1)
                at = piece
        number += 1
        at = 0
    return number, 0


@compiled
def add_rows(
    table: Table,
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    counts: NDArray[np.int64],
    passes: int,
    turn: int,
    number: int,
) -> int:
    """Add words that were counted before, those whose turn it is; gives where the table became full."""
    while number < bounds.size - 1:
        start, end = bounds[number], bounds[number + 1]
        if passes == 1 or (word_hash(data, start, end) >> np.uint64(32)) % np.uint64(passes) == np.uint64(turn):
            if not has_room(table, 1, end - start):
                return number
            add_word(table, data, start, end, counts[number])
        number += 1
    return number


@compiled
def chances(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each word that depends on the word and the seed and on nothing else."""
    salt = mixed(np.uint64(seed) ^ np.uint64(0x9E3779B97F4A7C15))
    drawn = np.empty(hashes.size, np.float64)
    for row in range(hashes.size):
        drawn[row] = np.float64(mixed(hashes[row] ^ salt) >> np.uint64(11)) * 2.0**-53
    return drawn
