"""The token store on disk: per shard a Megatron ``.bin/.idx`` pair and an Arrow file that names its documents.

``.bin`` is the token ids, end to end. ``.idx`` is, little-endian: the magic ``MMIDIDX\\0\\0``, version (u64, 1),
dtype code (u8), number of sequences (u64), number of document bounds (u64), then sequence lengths (i32 each),
byte offsets of sequences in ``.bin`` (i64 each), and document bounds as sequence numbers (i64 each, from 0).
Here a sequence is a document with its end-of-text token. ``.docs.arrow`` has one row a document, memory-mapped.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from zero2all.errors import Z2aError
from zero2all.io import MANIFEST, fingerprint, read_manifest

MAGIC = b"MMIDIDX\x00\x00"
# Megatron knows no unsigned 32-bit type, so vocabularies past 16 bits are stored as int32.
DTYPE_CODES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
DOCS_SCHEMA = pa.schema(
    [("gid", pa.string()), ("data_src", pa.string()), ("title", pa.string()), ("bytes", pa.int64())]
)
HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document bounds
KIND = "tokens"
FORMAT = 2
OPEN_SHARDS = 64  # a process has so many .bin files mapped at most
OPEN_INDEXES = 16  # and as many indexes of documents in memory, a few MiB each
Split = Literal["train", "valid"]
Array = np.ndarray[Any, Any]


def dtype_code(vocab_size: int) -> int:
    return 8 if vocab_size <= 2**16 else 4


@dataclass(frozen=True)
class DocumentName:
    gid: str
    data_src: str
    title: str
    bytes: int


class ShardWriter:
    """Writes ``<stem>.bin``, ``.idx`` and ``.docs.arrow``, a document at a time."""

    def __init__(self, stem: Path, vocab_size: int) -> None:
        self.stem, self.code = stem, dtype_code(vocab_size)
        self._lengths: list[Array] = []

    def __enter__(self) -> ShardWriter:
        self._bin = open(self.stem.with_suffix(".bin"), "wb")
        self._docs = pa.ipc.new_file(str(self.stem.with_suffix(".docs.arrow")), DOCS_SCHEMA)
        return self

    def write(self, names: pa.RecordBatch, documents: Sequence[Array], end: int) -> int:
        """Some documents, each followed by the token ``end``; returns how many tokens that makes."""
        lengths = np.array([len(ids) + 1 for ids in documents], dtype=np.int64)
        tokens = np.full(lengths.sum(), end, dtype=DTYPE_CODES[self.code])
        starts = np.cumsum(lengths) - lengths
        for start, ids in zip(starts.tolist(), documents, strict=True):
            tokens[start : start + len(ids)] = ids
        self._bin.write(tokens.tobytes())
        self._lengths.append(lengths)
        self._docs.write(names)
        return len(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        self._docs.close()
        if error is not None:
            return
        lengths = np.concatenate([np.empty(0), *self._lengths]).astype("<i4")
        sizes = lengths.astype("<i8") * DTYPE_CODES[self.code].itemsize
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes
        with open(self.stem.with_suffix(".idx"), "wb") as index:
            index.write(MAGIC + HEADER.pack(1, self.code, len(lengths), len(lengths) + 1))
            for column in (lengths, offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")):
                index.write(column.tobytes())


def damaged(path: Path, why: str) -> Z2aError:
    return Z2aError(f"{path} {why}: run 'z2a tokens build RECIPE', which checks every shard and rebuilds damaged ones")


@dataclass(frozen=True)
class Expected:
    """What the manifest of a store says of a shard."""

    tokens: int
    vocab_size: int
    record: str
    """sha256 of the shard's own record."""


class TokenShard:
    """One shard, memory-mapped while it is in use.

    A process has at most ``OPEN_SHARDS`` shards open: a corpus of terabytes has more of them than a process may have
    descriptors (1,024 by default) or mappings (65,530).
    """

    def __init__(self, stem: Path, expected: Expected | None = None) -> None:
        self.stem, self.expected = stem, expected

    @cached_property
    def _header(self) -> tuple[np.dtype[Any], int]:
        """The type of a token, and the number of documents."""
        path = self.stem.with_suffix(".idx")
        try:
            with open(path, "rb") as index:
                magic, rest = index.read(len(MAGIC)), index.read(HEADER.size)
                size = os.fstat(index.fileno()).st_size
        except FileNotFoundError:
            raise damaged(path, "is missing") from None
        version, code, count, bounds = HEADER.unpack(rest) if len(rest) == HEADER.size else (0, 0, 0, 0)
        if magic != MAGIC or version != 1 or code not in DTYPE_CODES:
            raise damaged(path, "is not a token index that this version reads")
        whole = len(MAGIC) + HEADER.size + 12 * count + 8 * bounds
        if size != whole or bounds != count + 1:
            raise damaged(path, f"has {size} bytes, not {whole}")
        return DTYPE_CODES[code], count

    @property
    def bin_bytes(self) -> int:
        """The size that ``.bin`` must have."""
        assert self.expected is not None
        return self.expected.tokens * DTYPE_CODES[dtype_code(self.expected.vocab_size)].itemsize

    def check_sizes(self) -> None:
        path = self.stem.with_suffix(".bin")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise damaged(path, "is missing") from None
        if self.expected is not None and size != self.bin_bytes:
            raise damaged(path, f"has {size} bytes, not {self.bin_bytes}")
        if self.expected is not None and self._header[0] != DTYPE_CODES[dtype_code(self.expected.vocab_size)]:
            raise damaged(self.stem.with_suffix(".idx"), "is of another vocabulary")

    def read(self, start: int, stop: int) -> Array:
        """A copy of the tokens [start, stop) as int64, each an id of the vocabulary."""
        tokens = self.tokens[start:stop].astype(np.int64)
        size = self.expected.vocab_size if self.expected is not None else np.iinfo(np.int32).max
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < size:
            raise damaged(
                self.stem.with_suffix(".bin"), f"has ids outside the vocabulary in tokens {start} to {stop - 1}"
            )
        return tokens

    @property
    def tokens(self) -> Array:
        """Keep no view of it: the shard stays open as long as there is one."""
        return _tokens(self)

    @property
    def document_starts(self) -> Array:
        """Where each document begins in ``tokens``, and at last where the last one ends."""
        return _index(self).starts

    def documents_between(self, start: int, stop: int) -> range:
        """Numbers of the documents that own the tokens [start, stop)."""
        first = int(np.searchsorted(self.document_starts, start, side="right")) - 1
        last = int(np.searchsorted(self.document_starts, stop, side="left"))
        return range(first, last)

    def document_name(self, number: int) -> DocumentName:
        index = _index(self)
        batch = int(np.searchsorted(index.batch_starts, number, side="right")) - 1
        row = index.names.get_batch(batch).slice(number - int(index.batch_starts[batch]), 1).to_pylist()[0]
        return DocumentName(**row)


@dataclass(frozen=True)
class DocumentIndex:
    """What a shard knows of its documents."""

    starts: Array
    names: pa.ipc.RecordBatchFileReader
    batch_starts: Array


# Keyed by the shard itself; the least recently used one is unmapped and closed when its last view is gone.
@lru_cache(maxsize=OPEN_SHARDS)
def _tokens(shard: TokenShard) -> Array:
    shard.check_sizes()
    return np.memmap(shard.stem.with_suffix(".bin"), dtype=shard._header[0], mode="r")


@lru_cache(maxsize=OPEN_INDEXES)
def _index(shard: TokenShard) -> DocumentIndex:
    start = len(MAGIC) + HEADER.size
    lengths = np.fromfile(shard.stem.with_suffix(".idx"), dtype="<i4", count=shard._header[1], offset=start)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if starts[-1] != len(shard.tokens):
        raise damaged(shard.stem.with_suffix(".idx"), "does not describe the .bin beside it")
    path = shard.stem.with_suffix(".docs.arrow")
    try:
        names = pa.ipc.open_file(pa.memory_map(str(path)))
        sizes = [names.get_batch(number).num_rows for number in range(names.num_record_batches)]
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged(path, f"cannot be read ({error})") from error
    if sum(sizes) != len(lengths):
        raise damaged(path, f"names {sum(sizes)} documents, not {len(lengths)}")
    return DocumentIndex(starts, names, np.cumsum([0, *sizes]))


class TokenStore:
    """One split of a token store: the shards of each source."""

    def __init__(self, directory: Path, split: Split) -> None:
        manifest = read_manifest(directory, KIND, "z2a tokens build RECIPE")
        self.directory, self.split = directory, split
        if manifest.get("format") != FORMAT:
            raise Z2aError(f"{directory} was built by another version: run 'z2a tokens build RECIPE' again")
        try:
            self.tokenizer_fingerprint: str = manifest["tokenizer"]
            self.vocab_size: int = manifest["vocab_size"]
            parts: dict[str, Any] = manifest["splits"][split]
            self.fingerprint = fingerprint({name: part["sha256"] for name, part in parts.items()})
            self.sources = {name: list(self._shards(part)) for name, part in parts.items()}
            self.shard_tokens: dict[str, list[int]] = {name: part["shard_tokens"] for name, part in parts.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(directory / MANIFEST, f"is damaged ({type(error).__name__}: {error})") from error

    def _shards(self, part: dict[str, Any]) -> Iterator[TokenShard]:
        for name, tokens, record in zip(part["shards"], part["shard_tokens"], part["records"], strict=True):
            yield TokenShard(self.directory / self.split / name, Expected(int(tokens), int(self.vocab_size), record))

    def has_a_sample(self, seq_len: int) -> bool:
        """Whether a source has so many tokens and their last target."""
        return any(sum(tokens) > seq_len for tokens in self.shard_tokens.values())

    def need_a_sample(self, seq_len: int) -> None:
        if not self.has_a_sample(seq_len):
            raise Z2aError("no held-out text of one full sample: raise corpus.holdout or give more text")
