"""MinHash signatures in one pass over the shingles.

Classic MinHash hashes every shingle once per slot, k times. This is Fast Similarity Sketching (Dahlgaard,
Knudsen, Thorup 2017, https://arxiv.org/abs/1704.04370): a round throws every shingle into one random slot, the least
value in a slot wins, and only documents with empty slots need another round. Two documents agree in a slot with
probability equal to their Jaccard similarity, as in classic MinHash, and the slots vary less; the work is
n + k log k in place of n * k, so that plain numpy spends more time on finding words than here, and no compiled
library is needed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zero2all.corpus.dedup.shingles import Counts, Hashes, splitmix64

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
