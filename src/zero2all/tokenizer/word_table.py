"""Compiled: a hash table from words to counts, in flat arrays whose size is known before the first word comes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from zero2all.tokenizer.compiled import compiled
from zero2all.tokenizer.cut import chop_end, word_end

ROW_BYTES = 64  # of memory for a row and its word, at the average length that the table is made for
WORD_BYTES = 16


class Table(NamedTuple):
    """Row r is the word ``letters[starts[r]:starts[r + 1]]``; ``rows[0]`` says how many there are."""

    slots: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    letters: NDArray[np.uint8]
    rows: NDArray[np.int64]

    def words(self) -> pa.Array:
        """The words as an Arrow array over the table's own memory."""
        rows = int(self.rows[0])
        buffers = [None, pa.py_buffer(self.starts), pa.py_buffer(self.letters)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), rows, buffers)


def new_table(rows: int, letters: int) -> Table:
    slots = 1 << (2 * rows - 1).bit_length()
    return Table(
        np.full(slots, -1, np.int32),
        np.empty(rows, np.uint64),
        np.empty(rows, np.int64),
        np.zeros(rows + 1, np.int64),
        np.empty(letters, np.uint8),
        np.zeros(1, np.int64),
    )


def table_within(memory: int) -> Table:
    """A table that takes at most this much memory, and half as much again while it is written."""
    rows = max(1 << 12, memory // ROW_BYTES)
    rows = 1 << (rows.bit_length() - 1)  # the slots are a power of two, so other sizes would waste some
    return new_table(rows, rows * WORD_BYTES)


def clear(table: Table) -> None:
    table.slots.fill(-1)
    table.rows[0] = 0


def grown(table: Table, letters: int = 0) -> Table:
    """The same words in a table of twice the size, or with room for at least this many letters."""
    larger = new_table(2 * table.hashes.size, max(2 * table.letters.size, letters))
    add_rows(larger, table.letters, table.starts[: int(table.rows[0]) + 1], table.counts, 1, 0, 0)
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


@compiled
def add_word(table: Table, data: NDArray[np.uint8], start: int, end: int, hashed: np.uint64, count: int) -> None:
    """The caller has seen to it that there is room."""
    last = np.uint64(table.slots.size - 1)
    slot = hashed & last
    size = end - start
    while table.slots[slot] >= 0:
        row = table.slots[slot]
        if table.hashes[row] == hashed and table.starts[row + 1] - table.starts[row] == size:
            at = table.starts[row]
            same = 0
            while same < size and table.letters[at + same] == data[start + same]:
                same += 1
            if same == size:
                table.counts[row] += count
                return
        slot = (slot + np.uint64(1)) & last
    row = table.rows[0]
    table.slots[slot] = row
    table.hashes[row] = hashed
    table.counts[row] = count
    at = table.starts[row]
    for offset in range(size):
        table.letters[at + offset] = data[start + offset]
    table.starts[row + 1] = at + size
    table.rows[0] = row + 1


@compiled
def has_room(table: Table, words: int, letters: int) -> bool:
    rows = table.rows[0]
    return bool(rows + words <= table.hashes.size and table.starts[rows] + letters <= table.letters.size)


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
                add_word(table, data, at, piece, word_hash(data, at, piece), 1)
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
        hashed = word_hash(data, start, end)
        if passes == 1 or (hashed >> np.uint64(32)) % np.uint64(passes) == np.uint64(turn):
            if not has_room(table, 1, end - start):
                return number
            add_word(table, data, start, end, hashed, counts[number])
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
