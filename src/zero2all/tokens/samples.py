"""Samples by number: their tokens, and the documents those tokens came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.io import fingerprint
from zero2all.tokens.order import SampleOrder
from zero2all.tokens.store import Array, Split, TokenShard, TokenStore

PACKING = "concat"


@dataclass(frozen=True)
class SamplePart:
    """A stretch of one document inside a sample."""

    sample: int
    gid: str
    source: str
    title: str
    shard: str
    document: int  # number in the shard
    first_token: int  # counted from the start of the document
    tokens: int


class ConcatRows:
    """Concatenate and cut: row r of a shard is its tokens [r*S, r*S + S], the last one only as a target."""

    def __init__(self, shards: list[TokenShard], shard_tokens: list[int], seq_len: int) -> None:
        self.shards, self.seq_len = shards, seq_len
        counts = [max(0, (tokens - 1) // seq_len) for tokens in shard_tokens]
        self._firsts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def place(self, row: int) -> tuple[TokenShard, int, int]:
        """The shard that holds a row, and the stretch of its tokens: inputs and the last target."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        start = (row - int(self._firsts[number])) * self.seq_len
        return self.shards[number], start, start + self.seq_len + 1


class Samples:
    """The training sequence: ``tokens(i, j)`` for training, ``documents(i)`` to trace where they came from."""

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        seed: int = 0,
        stage: str = "main",
        mixture: Mapping[str, float] | None = None,
    ) -> None:
        self.store, self.seq_len = store, seq_len
        self._rows = {
            name: ConcatRows(shards, store.shard_tokens[name], seq_len) for name, shards in store.sources.items()
        }
        self.order = SampleOrder({name: len(rows) for name, rows in self._rows.items()}, mixture, seed, stage)
        self.fingerprint = fingerprint([self.order.describe(), store.fingerprint, seq_len, PACKING])

    @classmethod
    def open(
        cls,
        directory: Path,
        split: Split,
        seq_len: int,
        seed: int = 0,
        stage: str = "main",
        mixture: Mapping[str, float] | None = None,
    ) -> Samples:
        return cls(TokenStore(directory, split), seq_len, seed, stage, mixture)

    @property
    def per_epoch(self) -> int:
        """Samples in one pass over every source in the mixture."""
        return self.order.rows_in_all

    @property
    def rows_of_sources(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in self._rows.items()}

    def tokens(self, start: int, stop: int) -> Array:
        """int64 [stop - start, seq_len + 1]: inputs are all but the last column, targets all but the first."""
        return self.read(start, stop)[0]

    def read(self, start: int, stop: int) -> tuple[Array, list[str]]:
        """Tokens as in ``tokens``, and the source that each sample is from."""
        out = np.empty((stop - start, self.seq_len + 1), dtype=np.int64)
        sources, numbers = self.order.locate(start, stop)
        names = [self.order.names[source] for source in sources]
        for line, (name, row) in enumerate(zip(names, numbers, strict=True)):
            shard, first, last = self._rows[name].place(int(row))
            out[line] = shard.read(first, last)
        return out, names

    def documents(self, start: int, stop: int) -> list[SamplePart]:
        """Every document with a token in samples [start, stop), as input or as the last target."""
        sources, numbers = self.order.locate(start, stop)
        return [
            part
            for sample, source, row in zip(range(start, stop), sources, numbers, strict=True)
            for part in _parts(sample, self._rows[self.order.names[source]], int(row))
        ]


def _parts(sample: int, rows: ConcatRows, row: int) -> list[SamplePart]:
    shard, first, last = rows.place(row)
    parts = []
    for number in shard.documents_between(first, last):
        begins, ends = int(shard.document_starts[number]), int(shard.document_starts[number + 1])
        start, stop = max(first, begins), min(last, ends)
        name = shard.document_name(number)
        parts.append(
            SamplePart(
                sample,
                name.gid,
                name.data_src,
                name.title,
                shard.stem.name,
                number,
                start - begins,
                stop - start,
            )
        )
    return parts
