"""Samples by index: their tokens, and the documents that these tokens came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from zero2all.io import fingerprint
from zero2all.tokens.estimated_store import SizedStore
from zero2all.tokens.sample_order import SampleOrder
from zero2all.tokens.token_store import Array, Split, TokenShard, TokenStore

PACKING = "concat"


@dataclass(frozen=True)
class DocumentSpan:
    """A span of one document inside a sample."""

    sample: int
    gid: str
    source: str
    title: str
    shard: str
    document: int  # index in the shard
    first_token: int  # counted from the start of the document
    tokens: int


class PackedSequences:
    """Concatenate and split: sequence i of a shard is its tokens [i*S, i*S + S], the last one only as a target."""

    def __init__(self, shards: list[TokenShard], shard_tokens: list[int], seq_len: int) -> None:
        self.shards, self.seq_len = shards, seq_len
        counts = [max(0, (tokens - 1) // seq_len) for tokens in shard_tokens]
        self._first_sequences = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._first_sequences[-1])

    def token_range(self, sequence: int) -> tuple[TokenShard, int, int]:
        """The shard that holds a sequence, and its range of tokens: inputs and the last target."""
        number = int(np.searchsorted(self._first_sequences, sequence, side="right")) - 1
        start = (sequence - int(self._first_sequences[number])) * self.seq_len
        return self.shards[number], start, start + self.seq_len + 1


class PackedDataset:
    """The samples of a stage in training order: ``tokens(i, j)`` to train on, ``documents(i, j)`` to trace them."""

    def __init__(
        self,
        store: SizedStore,
        seq_len: int,
        seed: int = 0,
        stage: str = "main",
        mixture: Mapping[str, float] | None = None,
    ) -> None:
        self.store, self.seq_len = store, seq_len
        self._sequences = {
            name: PackedSequences(shards, store.shard_tokens[name], seq_len) for name, shards in store.sources.items()
        }
        self.order = SampleOrder({name: len(packed) for name, packed in self._sequences.items()}, mixture, seed, stage)
        self.fingerprint = fingerprint([asdict(self.order.describe()), store.fingerprint, seq_len, PACKING])

    @classmethod
    def open(
        cls,
        directory: Path,
        split: Split,
        seq_len: int,
        seed: int = 0,
        stage: str = "main",
        mixture: Mapping[str, float] | None = None,
    ) -> PackedDataset:
        return cls(TokenStore(directory, split), seq_len, seed, stage, mixture)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one epoch over every source in the mixture."""
        return self.order.total_sequences

    @property
    def sequences_per_source(self) -> dict[str, int]:
        return {name: len(packed) for name, packed in self._sequences.items()}

    def tokens(self, start: int, stop: int) -> Array:
        """int64 [stop - start, seq_len + 1]: inputs are all but the last column, targets all but the first."""
        return self.read(start, stop)[0]

    def read(self, start: int, stop: int) -> tuple[Array, list[str]]:
        """Tokens as in ``tokens``, and the source of each sample."""
        out = np.empty((stop - start, self.seq_len + 1), dtype=np.int64)
        sources, numbers = self.order.locate(start, stop)
        names = [self.order.names[source] for source in sources]
        for row, (name, sequence) in enumerate(zip(names, numbers, strict=True)):
            shard, first, last = self._sequences[name].token_range(int(sequence))
            out[row] = shard.read(first, last)
        return out, names

    def documents(self, start: int, stop: int) -> list[DocumentSpan]:
        """Every document with a token in samples [start, stop), as input or as the last target."""
        sources, numbers = self.order.locate(start, stop)
        return [
            span
            for sample, source, sequence in zip(range(start, stop), sources, numbers, strict=True)
            for span in _document_spans(sample, self._sequences[self.order.names[source]], int(sequence))
        ]


def _document_spans(sample: int, packed: PackedSequences, sequence: int) -> list[DocumentSpan]:
    shard, first, last = packed.token_range(sequence)
    spans = []
    for number in shard.documents_between(first, last):
        begins, ends = int(shard.document_offsets[number]), int(shard.document_offsets[number + 1])
        start, stop = max(first, begins), min(last, ends)
        info = shard.document_info(number)
        spans.append(
            DocumentSpan(
                sample,
                info.gid,
                info.data_src,
                info.title,
                shard.stem.name,
                number,
                start - begins,
                stop - start,
            )
        )
    return spans
