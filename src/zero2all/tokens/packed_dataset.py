"""Samples by index: their tokens, the targets among them, and the documents that these tokens came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.base.conversation import SourceKind
from zero2all.base.io import MANIFEST, fingerprint
from zero2all.base.manifest import read_documents_manifest
from zero2all.recipe.objective_plugin import Conversations
from zero2all.tokens.conversation_rows import CompletionCounts, ConversationRows, RowCompletions
from zero2all.tokens.sample_order import SampleOrder
from zero2all.tokens.token_store import Array, Split, TokenShard, TokenStore

PACKING = "concat"
LARGE_VOCABULARY = 32768
BYTES_PER_TOKEN = (3, 4)  # of mixed Chinese, English and code: below a large vocabulary, and with one


class EstimatedStore:
    """Enough to plan a run: steps, epochs, schedule. It has nothing to read."""

    fingerprint = ""

    def __init__(self, source_tokens: Mapping[str, int]) -> None:
        self.sources: dict[str, list[TokenShard]] = {name: [] for name in source_tokens}
        self.shard_tokens = {name: [tokens] for name, tokens in source_tokens.items()}
        # Whether conversations are cut makes little difference to their tokens.
        self.kinds: dict[str, SourceKind] = dict.fromkeys(source_tokens, "text")


def estimate_source_tokens(documents: Path, vocab_size: int) -> dict[str, int] | None:
    """Tokens of each source, from the size of its documents; None if they are not built."""
    if not (documents / MANIFEST).exists():
        return None
    training = read_documents_manifest(documents).splits["train"]
    size = BYTES_PER_TOKEN[vocab_size >= LARGE_VOCABULARY]
    return {name: source.bytes // size for name, source in training.items()}


@dataclass(frozen=True)
class Samples:
    """Consecutive samples."""

    tokens: Array
    """int64 [samples, seq_len + 1]: inputs are all but the last column, targets all but the first."""
    mask: Array
    """Which tokens are targets; of the same shape."""
    sources: list[str]
    """The source of each sample."""
    is_first: Array | None
    """Which tokens are the first that attention sees of a document, of the same shape; None if it crosses documents.
    The first token of a sample need not be marked."""


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

    def __init__(
        self, shards: list[TokenShard], shard_tokens: list[int], seq_len: int, *, end_of_text_first: bool = True
    ) -> None:
        self.shards, self.seq_len, self.end_of_text_first = shards, seq_len, end_of_text_first
        counts = [max(0, (tokens - 1) // seq_len) for tokens in shard_tokens]
        self._first_sequences = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._first_sequences[-1])

    def token_range(self, sequence: int) -> tuple[TokenShard, int, int]:
        """The shard that holds a sequence, and its range of tokens: inputs and the last target."""
        number = int(np.searchsorted(self._first_sequences, sequence, side="right")) - 1
        start = (sequence - int(self._first_sequences[number])) * self.seq_len
        return self.shards[number], start, start + self.seq_len + 1

    def read(self, sequence: int) -> tuple[Array, Array]:
        """The tokens of a sequence as int64 [seq_len + 1], all of them targets."""
        shard, first, last = self.token_range(sequence)
        return shard.read(first, last), np.ones(last - first, dtype=bool)

    def is_first(self, sequence: int) -> Array:
        """Which tokens are the first of a document.

        A document starts at the end-of-text token of the one before it, as a prompt does in generation: so its first
        word has something to be predicted from, and nothing is predicted from a different document. Without
        ``end_of_text_first`` it starts after that token, as a conversation does that a chat template renders.
        """
        shard, first, last = self.token_range(sequence)
        origin = first + self.end_of_text_first
        found = np.zeros(last - first, dtype=bool)
        found[shard.document_starts(origin, origin + last - first) - origin] = True
        return found

    def count_targets(self, sequence: int) -> int:
        return self.seq_len


class PackedDataset:
    """The samples of a stage in training order: ``tokens(i, j)`` to train on, ``documents(i, j)`` to trace them."""

    def __init__(
        self,
        store: TokenStore | EstimatedStore,
        seq_len: int,
        seed: int = 0,
        stage: str = "main",
        mixture: Mapping[str, float] | None = None,
        conversations: Conversations = "cut",
        *,
        document_mask: bool = False,
    ) -> None:
        self.store, self.seq_len = store, seq_len
        self.masks_documents = document_mask or conversations != "cut"
        self.end_of_text_first = conversations == "cut"
        whole = {name for name, kind in store.kinds.items() if kind != "text" and conversations != "cut"}
        pairs = {name for name in whole if conversations == "pairs" and store.kinds[name] == "preference"}
        self._sequences: dict[str, PackedSequences | ConversationRows] = {
            name: ConversationRows(
                shards, seq_len, packing=conversations != "padded", per_example=2 if name in pairs else 1
            )
            if name in whole
            else PackedSequences(shards, store.shard_tokens[name], seq_len, end_of_text_first=self.end_of_text_first)
            for name, shards in store.sources.items()
        }
        self.order = SampleOrder({name: len(packed) for name, packed in self._sequences.items()}, mixture, seed, stage)
        rows = [conversations, sorted(whole)] if whole else []
        self.fingerprint = fingerprint([self.order.describe(), store.fingerprint, seq_len, PACKING, *rows])

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

    @property
    def conversation_rows(self) -> dict[str, ConversationRows]:
        """The sources of the mixture whose conversations are whole."""
        rows = {name: self._sequences[name] for name in self.order.names}
        return {name: of_source for name, of_source in rows.items() if isinstance(of_source, ConversationRows)}

    def tokens(self, start: int, stop: int) -> Array:
        """int64 [stop - start, seq_len + 1]: inputs are all but the last column, targets all but the first."""
        return self.read(start, stop).tokens

    def read(self, start: int, stop: int) -> Samples:
        """The samples [start, stop)."""
        shape = (stop - start, self.seq_len + 1)
        is_first = np.empty(shape, dtype=bool) if self.masks_documents else None
        samples = Samples(np.empty(shape, dtype=np.int64), np.empty(shape, dtype=bool), [], is_first)
        for row, (name, sequence) in enumerate(self.locate(start, stop)):
            packed = self._sequences[name]
            samples.tokens[row], samples.mask[row] = packed.read(sequence)
            if is_first is not None:
                is_first[row] = packed.is_first(sequence)
            samples.sources.append(name)
        return samples

    def read_completions(self, start: int, stop: int) -> list[RowCompletions]:
        """The completions in the samples [start, stop), which must be of conversations."""
        return [self._conversations(name).completions(sequence) for name, sequence in self.locate(start, stop)]

    def count_completions(self, start: int, stop: int) -> CompletionCounts:
        """Answers in the samples [start, stop), which must be of conversations."""
        counts = [self._conversations(name).count_completions(sequence) for name, sequence in self.locate(start, stop)]
        return CompletionCounts(*(sum(column) for column in zip(*counts, strict=True)))

    def completion_documents(self, start: int, stop: int) -> list[tuple[str, int]]:
        """Source and document of each completion in the samples [start, stop)."""
        located = self.locate(start, stop)
        return [(name, number) for name, row in located for number in self._conversations(name).row_documents(row)]

    def _conversations(self, source: str) -> ConversationRows:
        rows = self._sequences[source]
        assert isinstance(rows, ConversationRows)
        return rows

    def count_targets(self, start: int, stop: int) -> int:
        """Targets of the samples [start, stop)."""
        if not self.conversation_rows:
            return (stop - start) * self.seq_len
        return sum(self._sequences[name].count_targets(sequence) for name, sequence in self.locate(start, stop))

    def locate(self, start: int, stop: int) -> list[tuple[str, int]]:
        """The source of each of the samples [start, stop), and which of its sequences it is."""
        sources, numbers = self.order.locate(start, stop)
        return [(self.order.names[source], int(number)) for source, number in zip(sources, numbers, strict=True)]

    def documents(self, start: int, stop: int) -> list[DocumentSpan]:
        """Every document with a token in samples [start, stop), as input or as the last target."""
        return [
            span
            for sample, (name, sequence) in zip(range(start, stop), self.locate(start, stop), strict=True)
            for span in _document_spans(sample, self._sequences[name], sequence)
        ]


def _document_spans(sample: int, packed: PackedSequences | ConversationRows, sequence: int) -> list[DocumentSpan]:
    if isinstance(packed, ConversationRows):
        documents = packed.documents(sequence)
        return [_document_span(sample, one.shard, one.number, 0, one.tokens) for one in documents]
    shard, first, last = packed.token_range(sequence)
    spans = []
    for number in shard.documents_between(first, last):
        begins, ends = int(shard.document_offsets[number]), int(shard.document_offsets[number + 1])
        start, stop = max(first, begins), min(last, ends)
        spans.append(_document_span(sample, shard, number, start - begins, stop - start))
    return spans


def _document_span(sample: int, shard: TokenShard, number: int, first_token: int, tokens: int) -> DocumentSpan:
    info = shard.document_info(number)
    return DocumentSpan(sample, info.gid, info.data_src, info.title, shard.stem.name, number, first_token, tokens)
