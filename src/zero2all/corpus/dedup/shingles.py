"""Text to hashed n-grams and MinHash signatures, many documents at once, without a Python loop over characters.

A unit of prose is a word, or one character in scripts written without spaces: five units are a word 5-gram in English
and a character 5-gram in Chinese, and a text that mixes both needs no decision about which it is. A unit of code is a
run of letters, digits and underscores, or any other single character that is not a space.

Classic MinHash hashes every shingle once per slot, k times. This is Fast Similarity Sketching (Dahlgaard,
Knudsen, Thorup 2017, https://arxiv.org/abs/1704.04370): a round throws every shingle into one random slot, the least
value in a slot wins, and only documents with empty slots need another round. Two documents agree in a slot with
probability equal to their Jaccard similarity, as in classic MinHash, and the slots vary less; the work is
n + k log k in place of n * k, so that plain numpy spends more time on finding words than here, and no compiled
library is needed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Counts = NDArray[np.int64]

SEPARATOR, IN_WORD, ALONE = 0, 1, 2
# Characters that are words to us: Thai and Lao, Myanmar, Khmer, kana, and Han (with its extensions beyond the BMP).
UNSPACED_SCRIPTS = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF)),
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)
FIRST_HAN_EXTENSION, TABLE_SIZE = 0x20000, 0x40000

# Odd, and 5 mod 8: powers of the base then keep all but a few of the 64 bits apart.
HASH_BASE = 0x9E3779B97F4A7C15
HASH_BASE_INVERSE = pow(HASH_BASE, -1, 2**64)
NGRAM_HASH_BASE = np.uint64(0xD1342543DE82EF95)


@dataclass(frozen=True)
class HashedUnits:
    """The units of many documents, one after the other; ``ends[d]`` is where document ``d`` stops."""

    hashes: Hashes
    ends: Counts


@dataclass(frozen=True)
class CharacterTable:
    """For every code point: the hash of what it is folded to, and whether it separates, joins or stands alone."""

    hashes: Hashes
    roles: NDArray[np.uint8]


def splitmix64(values: Hashes) -> Hashes:
    """Spread every input bit over all 64 (the finaliser of splitmix64)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def hash_units(texts: Sequence[str], *, code: bool) -> HashedUnits:
    """Hash every unit of every text. Prose loses case, punctuation and width; code loses only its spaces."""
    table = _code_table() if code else _prose_table()
    points = np.frombuffer("\n".join([*texts, ""]).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    places = points.astype(np.intp)
    roles = table.roles.take(places, mode="clip")
    before, after = np.zeros_like(roles), np.zeros_like(roles)
    before[1:], after[:-1] = roles[:-1], roles[1:]
    # A unit starts at what stands alone, and at what is in a word unless its neighbour is in one too.
    starts = np.flatnonzero(roles > (before & IN_WORD))
    stops = np.flatnonzero(roles > (after & IN_WORD)) + 1

    # A polynomial over the characters so far; a unit's own hash is the difference between its ends, shifted back.
    powers, inverse_powers = _powers(len(points))
    sums = np.zeros(len(points) + 1, dtype=np.uint64)
    np.cumsum(table.hashes.take(places, mode="clip") * powers, out=sums[1:])
    hashes = (sums[stops] - sums[starts]) * inverse_powers[starts]
    text_ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    return HashedUnits(splitmix64(hashes), np.searchsorted(starts, text_ends).astype(np.int64))


def hash_ngrams(units: HashedUnits, n: int) -> tuple[Hashes, Counts]:
    """Hashes of every ``n`` units in a row within a document, and how many each document has."""
    lengths = np.diff(units.ends, prepend=0)
    counts = np.maximum(lengths - n + 1, 0)
    total = len(units.hashes) - n + 1
    if total <= 0:
        return np.zeros(0, dtype=np.uint64), counts
    hashes = units.hashes[:total].copy()
    for step in range(1, n):
        hashes *= NGRAM_HASH_BASE
        hashes += units.hashes[step : step + total]
    return hashes[_within_document(lengths, counts, total)], counts


def _within_document(lengths: Counts, counts: Counts, total: int) -> NDArray[np.bool_]:
    """True where an n-gram starts and ends in the same document."""
    pairs = np.stack([counts, lengths - counts], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(lengths)), pairs)[:total]


@lru_cache(maxsize=1)
def _all_powers(bits: int) -> tuple[Hashes, Hashes]:
    def powers(base: int) -> Hashes:
        out = np.full(2**bits, base, dtype=np.uint64)
        out[0] = 1
        return np.cumprod(out, dtype=np.uint64)

    return powers(HASH_BASE), powers(HASH_BASE_INVERSE)


def _powers(count: int) -> tuple[Hashes, Hashes]:
    powers, inverse_powers = _all_powers(max(20, (count - 1).bit_length()))
    return powers[:count], inverse_powers[:count]


def _point_hashes(points: NDArray[np.uint32]) -> Hashes:
    return splitmix64(splitmix64(points.astype(np.uint64) + np.uint64(1)))


@lru_cache(maxsize=1)
def _prose_table() -> CharacterTable:
    folded = np.arange(TABLE_SIZE, dtype=np.uint32)
    roles = np.full(TABLE_SIZE, SEPARATOR, dtype=np.uint8)
    for point in range(FIRST_HAN_EXTENSION):
        char = chr(point)
        if char.isalnum() or unicodedata.category(char).startswith("M"):
            roles[point] = IN_WORD
            # What expands to several characters is known by its first: this is a hash, not a text to read.
            folded[point] = ord((unicodedata.normalize("NFKC", char).casefold() or char)[0])
    for first, last in UNSPACED_SCRIPTS:
        part = roles[first : last + 1]
        part[(part == IN_WORD) | (first >= FIRST_HAN_EXTENSION)] = ALONE
    roles[-1] = SEPARATOR  # the last one stands for every code point beyond the table
    return CharacterTable(_point_hashes(folded), roles)


@lru_cache(maxsize=1)
def _code_table() -> CharacterTable:
    roles = np.full(TABLE_SIZE, IN_WORD, dtype=np.uint8)
    for point in range(FIRST_HAN_EXTENSION):
        char = chr(point)
        if char.isspace() or unicodedata.category(char).startswith("C"):
            roles[point] = SEPARATOR
        elif not (char.isalnum() or char == "_"):
            roles[point] = ALONE
    return CharacterTable(_point_hashes(np.arange(TABLE_SIZE, dtype=np.uint32)), roles)


Signatures = NDArray[np.uint32]  # documents x slots
Sketches = NDArray[np.uint8]  # documents x slots / 2

EMPTY = np.uint64(2**64 - 1)
LOW_32_BITS = np.uint64(2**32 - 1)
ROUND_STEP = 0x9E3779B97F4A7C15
SKETCH_BITS = 4


def minhash_signatures(shingles: Hashes, counts: Counts, slots: int, seed: int = 1) -> Signatures:
    """One row of ``slots`` values for each document; ``counts`` is the number of shingles per document."""
    least = np.full((len(counts), slots), EMPTY, dtype=np.uint64)
    waiting = np.flatnonzero(counts)  # documents with empty slots
    lengths, working = counts[waiting], least[waiting]
    owners = np.repeat(np.arange(len(waiting), dtype=np.int64), lengths)
    for number in range(2 * slots if len(waiting) else 0):
        _fill_slots(working, shingles, owners, number, seed)
        unfilled = (working == EMPTY).any(axis=1)
        if np.count_nonzero(unfilled) > 0.9 * len(unfilled):
            continue  # too few are done for compaction to pay off
        least[waiting[~unfilled]] = working[~unfilled]
        shingles = shingles[unfilled[owners]]
        waiting, lengths, working = waiting[unfilled], lengths[unfilled], working[unfilled]
        owners = np.repeat(np.arange(len(waiting), dtype=np.int64), lengths)
        if len(waiting) == 0:
            break
    least[waiting] = working
    # A later round's value is above every value of an earlier one while it competes; its round is part of what it is.
    rounds = (least >> np.uint64(32)) * np.uint64(0x9E3779B1)
    return ((least + rounds) & LOW_32_BITS).astype(np.uint32)


def _fill_slots(least: Hashes, shingles: Hashes, owners: Counts, number: int, seed: int) -> None:
    """Round ``number``: into a random slot, or in the second half of the rounds all into the same one."""
    slots = least.shape[1]
    values = splitmix64(shingles ^ np.uint64((seed * slots * 2 + number) * ROUND_STEP % 2**64))
    if number < slots:
        slot = ((values >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32)
    else:
        slot = np.full(len(values), number - slots, dtype=np.uint64)
    values &= LOW_32_BITS
    values |= np.uint64(number << 32)
    np.minimum.at(least.reshape(-1), owners * slots + slot.astype(np.int64), values)


def band_hashes(rows: Signatures, bands: int) -> Hashes:
    """Documents x bands: documents that agree in a full band agree here, whatever the other bands are."""
    documents, slots = rows.shape
    values = rows.reshape(documents, bands, slots // bands).astype(np.uint64)
    hashes = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (documents, bands)).copy()
    for place in range(values.shape[2]):
        hashes = splitmix64(hashes * np.uint64(ROUND_STEP) + values[:, :, place])
    return hashes


def pack_sketches(rows: Signatures) -> Sketches:
    """Four bits of each slot: enough to estimate similarity to within what 112 slots allow anyway."""
    few = (rows & np.uint32(2**SKETCH_BITS - 1)).astype(np.uint8)
    if few.shape[1] % 2:
        few = np.pad(few, ((0, 0), (0, 1)))
    packed: Sketches = few[:, 0::2] | (few[:, 1::2] << np.uint8(SKETCH_BITS))
    return packed


def estimate_jaccard(one: Sketches, other: Sketches, slots: int) -> NDArray[np.float64]:
    """Estimated Jaccard similarity row by row, corrected for slots that agree by chance."""
    differ = one ^ other
    unequal = np.count_nonzero(differ & 0x0F, axis=1) + np.count_nonzero(differ >> SKETCH_BITS, axis=1)
    agree = 1 - unequal / slots
    chance = 1 / 2**SKETCH_BITS
    estimate: NDArray[np.float64] = (agree - chance) / (1 - chance)
    return estimate
