"""The order of training samples as a pure function of their number.

Sample ``i`` is found in two closed-form steps, with nothing shuffled, stored or carried along:

1. *Which source.* Samples come in blocks of 65,536 in which every source has a fixed quota (its weight), spread as
   evenly as whole numbers allow: any stretch of samples holds each source within about one of its share. So the
   n-th sample that a source gives is known from ``i`` alone.
2. *Which row of it.* The n-th sample of a source is row ``n mod rows`` of its epoch ``n // rows``, sent through a
   permutation keyed by seed, stage, source and epoch (a Feistel network with cycle walking). Each epoch visits
   every row exactly once.

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
        self,
        rows: Mapping[str, int],
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        stage: str = "main",
    ) -> None:
        if weights:
            for name in weights:
                if rows.get(name, 0) < 1:
                    raise UsageError(
                        f"the mixture asks for {name!r}, which has no full sample; "
                        f"sources with samples: {', '.join(n for n, count in rows.items() if count) or 'none'}"
                    )
        else:
            weights = {name: count for name, count in rows.items() if count}
        if not weights:
            raise UsageError("no source has a full sample: use more text or a shorter train.seq_len")
        self.names = sorted(weights)
        self.rows = np.array([rows[name] for name in self.names], dtype=np.int64)
        self.seed, self.stage = seed, stage
        self.quotas = block_quotas(np.array([weights[name] for name in self.names], dtype=np.float64))
        self._source_at = _spread(self.quotas)
        self._turn_at = _turns(self._source_at, len(self.names))

    def describe(self) -> dict[str, Any]:
        """All that the order depends on, for fingerprints."""
        return {
            "seed": self.seed,
            "stage": self.stage,
            "rows": {name: int(count) for name, count in zip(self.names, self.rows, strict=True)},
            "quotas": {name: int(quota) for name, quota in zip(self.names, self.quotas, strict=True)},
        }

    def locate(self, start: int, stop: int) -> tuple[Array, Array]:
        """For samples [start, stop): the number of each one's source in ``names``, and its row in that source."""
        index = np.arange(start, stop, dtype=np.int64)
        block, place = np.divmod(index, BLOCK)
        source = self._source_at[place]
        turn = block * self.quotas[source] + self._turn_at[place]
        epoch, position = np.divmod(turn, self.rows[source])
        rows = np.empty_like(position)
        for number in np.unique(source):
            of_source = source == number
            for one_epoch in np.unique(epoch[of_source]):
                mine = of_source & (epoch == one_epoch)
                rows[mine] = permute(position[mine], int(self.rows[number]), self._keys(int(number), int(one_epoch)))
        return source, rows

    def epochs_at(self, sample: int) -> dict[str, float]:
        """How often each source has been gone through before this sample."""
        block, place = divmod(sample, BLOCK)
        seen = np.bincount(self._source_at[:place], minlength=len(self.names)) + block * self.quotas
        return {name: float(count / total) for name, count, total in zip(self.names, seen, self.rows, strict=True)}

    def _keys(self, source: int, epoch: int) -> Array:
        text = f"{self.seed}/{self.stage}/{self.names[source]}/{epoch}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), dtype="<u8")


def block_quotas(weights: Array) -> Array:
    """Whole samples a block for each source: largest remainders, and at least one for every source."""
    exact = weights / weights.sum() * BLOCK
    quotas: Array = np.maximum(np.floor(exact), 1).astype(np.int64)
    short = BLOCK - int(quotas.sum())
    if short >= 0:
        quotas[np.argsort(quotas - exact, kind="stable")[:short]] += 1
    else:  # tiny sources were lifted to one; the largest can spare it
        quotas[np.argmax(quotas)] += short
    return quotas


def _spread(quotas: Array) -> Array:
    """Lay each source evenly over the block: its k-th sample wants to stand at (k + 1/2) / quota."""
    source = np.repeat(np.arange(len(quotas)), quotas)
    wanted = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    spread: Array = source[np.argsort(wanted, kind="stable")]
    return spread


def _turns(source_at: Array, sources: int) -> Array:
    """For each place in the block, how many samples of the same source stand before it."""
    turns = np.empty(len(source_at), dtype=np.int64)
    for number in range(sources):
        places = np.flatnonzero(source_at == number)
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
