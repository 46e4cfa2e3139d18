"""The order of training samples as a pure function of their number.

Sample ``i`` is found in two closed-form steps, with nothing shuffled, stored or carried along:

1. *Which pool.* With a mixture, each source is a pool of rows. Samples come in blocks of 65,536 in which every pool has
   a fixed quota (its weight), spread as evenly as whole numbers allow: any stretch of samples holds each source within
   about one of its share. So the n-th sample that a pool gives is known from ``i`` alone. Without a mixture all sources
   are one pool, in which every row has the same chance.
2. *Which row of it.* The n-th sample of a pool is row ``n mod rows`` of its epoch ``n // rows``, sent through a
   permutation keyed by seed, stage, pool and epoch (a Feistel network with cycle walking). Each epoch visits every row
   exactly once.

Hence resuming needs one integer, any world size slices the same sequence, and sample 10^12 costs as much as sample 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from zero2all.errors import UsageError

BLOCK = 2**16
ROUNDS = 4
Array = np.ndarray[Any, Any]


class SampleOrder:
    """
    >>> order = SampleOrder({"zh": 1000, "en": 500}, {"zh": 2, "en": 1}, seed=7)
    >>> sources, rows = order.locate(0, 6)
    >>> [order.names[s] for s in sources]
    ['zh', 'en', 'zh', 'zh', 'en', 'zh']
    """

    def __init__(
        self, rows: Mapping[str, int], weights: Mapping[str, float] | None = None, seed: int = 0, stage: str = "main"
    ) -> None:
        if sum(rows.values()) == 0:
            raise UsageError("no source has a full sample: use more text or a shorter train.seq_len")
        empty = [name for name in weights or {} if not rows.get(name)]
        if empty:
            full = ", ".join(name for name, count in rows.items() if count)
            raise UsageError(f"the mixture asks for {', '.join(empty)}, without a full sample; there are: {full}")
        self.seed, self.stage = seed, stage
        self.names = sorted(weights or (name for name, count in rows.items() if count))
        self._rows = np.array([rows[name] for name in self.names], dtype=np.int64)
        pools = [[number] for number in range(len(self.names))] if weights else [list(range(len(self.names)))]
        self._pool_names = ["+".join(self.names[number] for number in pool) for pool in pools]
        self._first_source = np.array([pool[0] for pool in pools])
        # Row r of a pool belongs to the first of its sources whose end lies past r. Ends are counted over all pools.
        self._source_ends = np.cumsum(self._rows)
        self._source_starts = self._source_ends - self._rows
        self._pool_rows = np.array([self._rows[pool].sum() for pool in pools])
        self.quotas = block_quotas(np.array([weights[name] for name in self.names] if weights else [1.0]))
        self._pool_at = _spread(self.quotas)
        self._turn_at = _turns(self._pool_at, len(pools))

    @property
    def rows_in_all(self) -> int:
        """Rows of every source that takes part."""
        return int(self._rows.sum())

    def describe(self) -> dict[str, Any]:
        """All that the order depends on, for fingerprints."""
        return {
            "seed": self.seed,
            "stage": self.stage,
            "rows": {name: int(count) for name, count in zip(self.names, self._rows, strict=True)},
            "quotas": {name: int(quota) for name, quota in zip(self._pool_names, self.quotas, strict=True)},
        }

    def locate(self, start: int, stop: int) -> tuple[Array, Array]:
        """For samples [start, stop): the number of each one's source in ``names``, and its row in that source."""
        block, place = np.divmod(np.arange(start, stop, dtype=np.int64), BLOCK)
        pool = self._pool_at[place]
        turn = block * self.quotas[pool] + self._turn_at[place]
        epoch, position = np.divmod(turn, self._pool_rows[pool])
        row = np.empty_like(position)
        for number in np.unique(pool):
            for one_epoch in np.unique(epoch[pool == number]):
                mine = (pool == number) & (epoch == one_epoch)
                row[mine] = permute(position[mine], int(self._pool_rows[number]), self._keys(number, one_epoch))
        row += self._source_starts[self._first_source[pool]]
        source = np.searchsorted(self._source_ends, row, side="right")
        return source, row - self._source_starts[source]

    def epochs_at(self, sample: int) -> dict[str, float]:
        """How often each source has been gone through before this sample."""
        block, place = divmod(sample, BLOCK)
        seen = np.bincount(self._pool_at[:place], minlength=len(self.quotas)) + block * self.quotas
        passes = seen / self._pool_rows
        pool_of = np.searchsorted(self._first_source, np.arange(len(self.names)), side="right") - 1
        return {name: float(passes[pool]) for name, pool in zip(self.names, pool_of, strict=True)}

    def _keys(self, pool: int, epoch: int) -> Array:
        text = f"{self.seed}/{self.stage}/{self._pool_names[pool]}/{epoch}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), dtype="<u8")


def block_quotas(weights: Array) -> Array:
    """Whole samples a block for each weight: largest remainders, and at least one for each."""
    exact = weights / weights.sum() * BLOCK
    quotas: Array = np.maximum(np.floor(exact), 1).astype(np.int64)
    short = BLOCK - int(quotas.sum())
    if short >= 0:
        quotas[np.argsort(quotas - exact, kind="stable")[:short]] += 1
    else:  # tiny weights were lifted to one; the largest can spare it
        quotas[np.argmax(quotas)] += short
    return quotas


def _spread(quotas: Array) -> Array:
    """Lay each pool evenly over the block: its k-th sample wants to stand at (k + 1/2) / quota."""
    pool = np.repeat(np.arange(len(quotas)), quotas)
    wanted = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    spread: Array = pool[np.argsort(wanted, kind="stable")]
    return spread


def _turns(pool_at: Array, pools: int) -> Array:
    """For each place in the block, how many samples of the same pool stand before it."""
    turns = np.empty(len(pool_at), dtype=np.int64)
    for number in range(pools):
        places = np.flatnonzero(pool_at == number)
        turns[places] = np.arange(len(places))
    return turns


def permute(index: Array, size: int, keys: Array) -> Array:
    """A keyed permutation of range(size), elementwise: a balanced Feistel network walked until it lands inside."""
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
    """A 64-bit finalizer: every input bit moves every output bit."""
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: Array = value ^ (value >> np.uint64(33))
    return mixed
