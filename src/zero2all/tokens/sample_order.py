"""The order of training samples as a pure function of their index.

Sample ``i`` is found in two closed-form steps; no shuffled index is built, stored or carried along:

1. *Which pool.* With a mixture, each source is a pool of sequences. Samples come in blocks of 65,536 in which every
   pool has a fixed quota (its weight), interleaved as evenly as integers allow: any range of samples holds each source
   within about one sample of its share. So ``i`` alone gives the pool and the number ``n`` of its samples before.
   Without a mixture all sources are one pool, in which every sequence has the same probability.
2. *Which sequence.* Sample ``n`` of a pool of ``size`` sequences is sequence ``n mod size`` of its epoch ``n // size``,
   mapped through a permutation keyed by seed, stage, pool and epoch (a Feistel network with cycle walking). Each epoch
   visits every sequence exactly once.

Hence resuming needs one integer, any world size shards the same order, and sample 10^12 costs as much as sample 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from zero2all.base.errors import UsageError

BLOCK_SAMPLES = 2**16
FEISTEL_ROUNDS = 4
Array = np.ndarray[Any, Any]


class SampleOrder:
    """The shuffled order of samples over all epochs and sources, computed from the seed without a stored permutation.

    >>> order = SampleOrder({"zh": 1000, "en": 500}, {"zh": 2, "en": 1}, seed=7)
    >>> sources, sequences = order.locate(0, 6)
    >>> [order.names[s] for s in sources]
    ['zh', 'en', 'zh', 'zh', 'en', 'zh']
    """

    def __init__(
        self,
        sequence_counts: Mapping[str, int],
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        stage: str = "main",
    ) -> None:
        if sum(sequence_counts.values()) == 0:
            raise UsageError("no source has a full sequence: use more text or a shorter train.seq_len")
        empty = [name for name in weights or {} if not sequence_counts.get(name)]
        if empty:
            full = ", ".join(name for name, count in sequence_counts.items() if count)
            raise UsageError(f"the mixture asks for {', '.join(empty)}, without a full sequence; there are: {full}")
        self.seed, self.stage = seed, stage
        self.names = sorted(weights or (name for name, count in sequence_counts.items() if count))
        self._sequence_counts = np.array([sequence_counts[name] for name in self.names], dtype=np.int64)
        pools = [[number] for number in range(len(self.names))] if weights else [list(range(len(self.names)))]
        self._pool_names = ["+".join(self.names[number] for number in pool) for pool in pools]
        self._first_source = np.array([pool[0] for pool in pools])
        # Sequence s of a pool belongs to the first of its sources whose end is past s. Ends are counted over all pools.
        self._source_ends = np.cumsum(self._sequence_counts)
        self._source_starts = self._source_ends - self._sequence_counts
        self._pool_sequences = np.array([self._sequence_counts[pool].sum() for pool in pools])
        self.quotas = block_quotas(np.array([weights[name] for name in self.names] if weights else [1.0]))
        self._slot_pool = _interleave_pools(self.quotas)
        self._slot_turn = _turns_within_pool(self._slot_pool, len(pools))

    @property
    def total_sequences(self) -> int:
        """Sequences of all sources in the mixture."""
        return int(self._sequence_counts.sum())

    def describe(self) -> dict[str, Any]:
        """Everything that an order depends on: sequences by source, and samples of a block by pool."""
        rows = dict(zip(self.names, self._sequence_counts.tolist(), strict=True))
        quotas = dict(zip(self._pool_names, self.quotas.tolist(), strict=True))
        return {"seed": self.seed, "stage": self.stage, "rows": rows, "quotas": quotas}

    def locate(self, start: int, stop: int) -> tuple[Array, Array]:
        """For samples [start, stop): the index of each source in ``names``, and of the sequence in that source."""
        block, slot = np.divmod(np.arange(start, stop, dtype=np.int64), BLOCK_SAMPLES)
        pool = self._slot_pool[slot]
        turn = block * self.quotas[pool] + self._slot_turn[slot]
        epoch, position = np.divmod(turn, self._pool_sequences[pool])
        sequence = np.empty_like(position)
        for number in np.unique(pool):
            for one_epoch in np.unique(epoch[pool == number]):
                selected = (pool == number) & (epoch == one_epoch)
                sequence[selected] = feistel_permute(
                    position[selected], int(self._pool_sequences[number]), self._round_keys(number, one_epoch)
                )
        sequence += self._source_starts[self._first_source[pool]]
        source = np.searchsorted(self._source_ends, sequence, side="right")
        return source, sequence - self._source_starts[source]

    def epochs_before(self, sample: int) -> dict[str, float]:
        """Epochs of each source before this sample."""
        block, slot = divmod(sample, BLOCK_SAMPLES)
        seen = np.bincount(self._slot_pool[:slot], minlength=len(self.quotas)) + block * self.quotas
        epochs = seen / self._pool_sequences
        pool_of = np.searchsorted(self._first_source, np.arange(len(self.names)), side="right") - 1
        return {name: float(epochs[pool]) for name, pool in zip(self.names, pool_of, strict=True)}

    def _round_keys(self, pool: int, epoch: int) -> Array:
        text = f"{self.seed}/{self.stage}/{self._pool_names[pool]}/{epoch}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * FEISTEL_ROUNDS).digest(), dtype="<u8")


def block_quotas(weights: Array) -> Array:
    """Samples per block for each weight, by largest remainder, and at least one for each."""
    exact = weights / weights.sum() * BLOCK_SAMPLES
    quotas: Array = np.maximum(np.floor(exact), 1).astype(np.int64)
    remainder = BLOCK_SAMPLES - int(quotas.sum())
    if remainder >= 0:
        quotas[np.argsort(quotas - exact, kind="stable")[:remainder]] += 1
    else:  # tiny weights were raised to one; take the difference from the largest
        quotas[np.argmax(quotas)] += remainder
    return quotas


def _interleave_pools(quotas: Array) -> Array:
    """Interleave the pools evenly over the block: the ideal position of sample k of a pool is (k + 1/2) / quota."""
    pool = np.repeat(np.arange(len(quotas)), quotas)
    ideal = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    interleaved: Array = pool[np.argsort(ideal, kind="stable")]
    return interleaved


def _turns_within_pool(slot_pool: Array, pools: int) -> Array:
    """For each slot of the block, how many samples of the same pool come before it."""
    turns = np.empty(len(slot_pool), dtype=np.int64)
    for number in range(pools):
        slots = np.flatnonzero(slot_pool == number)
        turns[slots] = np.arange(len(slots))
    return turns


def feistel_permute(index: Array, size: int, keys: Array) -> Array:
    """A keyed permutation of range(size), elementwise: a balanced Feistel network with cycle walking."""
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    value = index.astype(np.uint64)
    walking = np.ones(len(value), dtype=bool)
    while walking.any():
        left, right = value[walking] >> half, value[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value[walking] = (left << half) | right
        walking[walking] = value[walking] >= size
    return value.astype(np.int64)


def _mix(value: Array) -> Array:
    """A 64-bit finalizer: every input bit affects every output bit."""
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: Array = value ^ (value >> np.uint64(33))
    return mixed
