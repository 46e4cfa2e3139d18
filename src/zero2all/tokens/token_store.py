"""The token store on disk: per shard a Megatron ``.bin/.idx`` pair and an Arrow file that names its documents.

``.bin`` is the token ids, end to end. ``.idx`` is, little-endian: the magic ``MMIDIDX\\0\\0``, version (u64, 1),
dtype code (u8), number of sequences (u64), number of document bounds (u64), then sequence lengths (i32 each),
byte offsets of sequences in ``.bin`` (i64 each), and document bounds as sequence numbers (i64 each, from 0).
Here a sequence is a document with its end-of-text token. ``.docs.arrow`` has one row a document, memory-mapped.
A shard of conversations also has ``.mask``, a byte for each token: 1 where the assistant writes it, or 2 in an answer
that is rejected. A pair is two documents: the chosen one, then the rejected one.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa

from zero2all.base.conversation import SourceKind
from zero2all.base.errors import Z2aError
from zero2all.base.io import MANIFEST, fingerprint
from zero2all.base.manifest import read_manifest
from zero2all.base.records import parse_record
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.tokens.manifest import SourceShards, StoreManifest

MAGIC = b"MMIDIDX\x00\x00"
# Megatron knows no unsigned 32-bit type, so vocabularies past 16 bits are stored as int32.
DTYPE_CODES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
DOCS_SCHEMA = pa.schema(
    [("gid", pa.string()), ("data_src", pa.string()), ("title", pa.string()), ("bytes", pa.int64())]
)
HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document bounds
KIND = "tokens"
FORMAT = 2
MASK_SUFFIX = ".mask"
CONTENT: dict[SourceKind, str] = {
    "text": "text",
    "chat": "conversations",
    "preference": "preference pairs",
    "rating": "completions with labels",
}
MAX_OPEN_SHARDS = 64  # .bin files mapped per process at most
MAX_OPEN_INDEXES = 16  # document indexes in memory at most, a few MiB each
Split = Literal["train", "valid"]
Array = np.ndarray[Any, Any]


def dtype_code(vocab_size: int) -> int:
    return 8 if vocab_size <= 2**16 else 4


@dataclass(frozen=True)
class DocumentInfo:
    gid: str
    data_src: str
    title: str
    bytes: int


class TokenShardWriter:
    """Writes ``<stem>.bin``, ``.idx``, ``.docs.arrow`` and, if asked for, ``.mask``, a document at a time."""

    def __init__(self, stem: Path, vocab_size: int, *, with_mask: bool = False) -> None:
        self.stem, self.dtype_code, self._with_mask = stem, dtype_code(vocab_size), with_mask
        self._lengths: list[Array] = []
        self._mask: BinaryIO | None = None

    def __enter__(self) -> TokenShardWriter:
        self._bin = open(self.stem.with_suffix(".bin"), "wb")
        if self._with_mask:
            self._mask = open(self.stem.with_suffix(MASK_SUFFIX), "wb")
        self._docs = pa.ipc.new_file(str(self.stem.with_suffix(".docs.arrow")), DOCS_SCHEMA)
        return self

    def write(
        self,
        document_rows: pa.RecordBatch,
        documents: Sequence[Array],
        end_of_text: int,
        masks: Sequence[Array] | None = None,
    ) -> int:
        """Append documents, each followed by ``end_of_text``; returns the number of tokens written."""
        lengths = np.array([len(ids) + 1 for ids in documents], dtype=np.int64)
        tokens = np.full(lengths.sum(), end_of_text, dtype=DTYPE_CODES[self.dtype_code])
        starts = np.cumsum(lengths) - lengths
        for start, ids in zip(starts.tolist(), documents, strict=True):
            tokens[start : start + len(ids)] = ids
        self._bin.write(tokens.tobytes())
        if self._mask is not None:
            assert masks is not None
            for mask in masks:
                self._mask.write(mask.astype(np.uint8).tobytes() + b"\0")
        self._lengths.append(lengths)
        self._docs.write(document_rows)
        return len(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        if self._mask is not None:
            self._mask.close()
        self._docs.close()
        if error is not None:
            return
        lengths = np.concatenate([np.empty(0), *self._lengths]).astype("<i4")
        sizes = lengths.astype("<i8") * DTYPE_CODES[self.dtype_code].itemsize
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes
        with open(self.stem.with_suffix(".idx"), "wb") as index:
            index.write(MAGIC + HEADER.pack(1, self.dtype_code, len(lengths), len(lengths) + 1))
            for column in (lengths, offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")):
                index.write(column.tobytes())


def damaged_error(path: Path, reason: str) -> Z2aError:
    return Z2aError(
        f"{path} {reason}: run 'z2a tokens build RECIPE --verify', which checks every shard and rebuilds damaged ones"
    )


@dataclass(frozen=True)
class ShardManifestEntry:
    """A shard's entry in the manifest of the store."""

    tokens: int
    vocab_size: int
    record_sha256: str
    """sha256 of the shard's own record."""


class TokenShard:
    """One shard, memory-mapped while it is in use.

    A process has at most ``MAX_OPEN_SHARDS`` shards open: a corpus of terabytes has more of them than a process may
    have descriptors (1,024 by default) or mappings (65,530).
    """

    def __init__(self, stem: Path, manifest_entry: ShardManifestEntry | None = None) -> None:
        self.stem, self.manifest_entry = stem, manifest_entry

    @cached_property
    def _header(self) -> tuple[np.dtype[Any], int]:
        """The type of a token, and the number of documents."""
        path = self.stem.with_suffix(".idx")
        try:
            with open(path, "rb") as index:
                magic, rest = index.read(len(MAGIC)), index.read(HEADER.size)
                size = os.fstat(index.fileno()).st_size
        except FileNotFoundError:
            raise damaged_error(path, "is missing") from None
        version, code, count, bounds = HEADER.unpack(rest) if len(rest) == HEADER.size else (0, 0, 0, 0)
        if magic != MAGIC or version != 1 or code not in DTYPE_CODES:
            raise damaged_error(path, "is not a token index that this version reads")
        expected_size = len(MAGIC) + HEADER.size + 12 * count + 8 * bounds
        if size != expected_size or bounds != count + 1:
            raise damaged_error(path, f"has {size} bytes, not {expected_size}")
        return DTYPE_CODES[code], count

    @property
    def bin_bytes(self) -> int:
        """The size that ``.bin`` must have."""
        assert self.manifest_entry is not None
        return self.manifest_entry.tokens * DTYPE_CODES[dtype_code(self.manifest_entry.vocab_size)].itemsize

    def check_sizes(self) -> None:
        path = self.stem.with_suffix(".bin")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise damaged_error(path, "is missing") from None
        if self.manifest_entry is not None and size != self.bin_bytes:
            raise damaged_error(path, f"has {size} bytes, not {self.bin_bytes}")
        if (
            self.manifest_entry is not None
            and self._header[0] != DTYPE_CODES[dtype_code(self.manifest_entry.vocab_size)]
        ):
            raise damaged_error(self.stem.with_suffix(".idx"), "is of another vocabulary")

    def read(self, start: int, stop: int) -> Array:
        """A copy of the tokens [start, stop) as int64, each an id of the vocabulary."""
        tokens = self.tokens[start:stop].astype(np.int64)
        size = self.manifest_entry.vocab_size if self.manifest_entry is not None else np.iinfo(np.int32).max
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < size:
            raise damaged_error(
                self.stem.with_suffix(".bin"), f"has ids outside the vocabulary in tokens {start} to {stop - 1}"
            )
        return tokens

    def read_mask(self, start: int, stop: int) -> Array:
        """Which of the tokens [start, stop) the assistant writes, a copy. Only for a shard of conversations."""
        return self.read_labels(start, stop).astype(bool)

    def read_labels(self, start: int, stop: int) -> Array:
        """The same as the bytes of the file: 1, or 2 where the answer is rejected."""
        labels: Array = np.array(_map_mask(self)[start:stop])
        return labels

    @property
    def tokens(self) -> Array:
        """Keep no view of it: the shard stays open as long as there is one."""
        return _map_tokens(self)

    @property
    def document_offsets(self) -> Array:
        """Where each document begins in ``tokens``, and finally where the last one ends."""
        return _load_document_index(self).document_offsets

    def document_starts(self, start: int, stop: int) -> Array:
        """The documents that start at the tokens [start, stop): where, in order.

        A binary search in the mapped index reads a few pages of it: a sample of a large corpus may be in any shard.
        """
        offsets, itemsize = _map_document_offsets(self), self._header[0].itemsize
        first = bisect_left(offsets, start * itemsize)
        # A document has at least one token, so there are at most as many as tokens.
        last = bisect_left(offsets, stop * itemsize, first, min(len(offsets), first + stop - start))
        starts: Array = offsets[first:last] // itemsize
        return starts

    def documents_between(self, start: int, stop: int) -> range:
        """Indexes of the documents that hold the tokens [start, stop)."""
        first = int(np.searchsorted(self.document_offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.document_offsets, stop, side="left"))
        return range(first, last)

    def document_info(self, number: int) -> DocumentInfo:
        index = _load_document_index(self)
        arrow_batch = int(np.searchsorted(index.arrow_batch_starts, number, side="right")) - 1
        row = (
            index.info_reader.get_batch(arrow_batch)
            .slice(number - int(index.arrow_batch_starts[arrow_batch]), 1)
            .to_pylist()[0]
        )
        return DocumentInfo(**row)


@dataclass(frozen=True)
class DocumentIndex:
    """The documents of a shard: their offsets and their metadata."""

    document_offsets: Array
    info_reader: pa.ipc.RecordBatchFileReader
    arrow_batch_starts: Array


# Keyed by the shard itself; the least recently used one is unmapped and closed when its last view is gone.
@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _map_tokens(shard: TokenShard) -> Array:
    shard.check_sizes()
    return np.memmap(shard.stem.with_suffix(".bin"), dtype=shard._header[0], mode="r")


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _map_document_offsets(shard: TokenShard) -> Array:
    """In bytes of ``.bin``, for a binary search in Python: numpy would copy a column that is not aligned."""
    dtype, count = shard._header
    path, start = shard.stem.with_suffix(".idx"), len(MAGIC) + HEADER.size
    index: Array = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))[start : start + 12 * count]
    lengths, offsets = index[: 4 * count].view("<i4"), index[4 * count :].view("<i8")
    end = int(offsets[-1]) // dtype.itemsize + int(lengths[-1]) if count else 0
    if end != len(shard.tokens):
        raise damaged_error(path, "does not describe the .bin beside it")
    return offsets


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _map_mask(shard: TokenShard) -> Array:
    path = shard.stem.with_suffix(MASK_SUFFIX)
    if not path.exists():
        raise damaged_error(path, "is missing")
    mask = np.memmap(path, dtype=np.uint8, mode="r")
    if len(mask) != len(shard.tokens):
        raise damaged_error(path, f"has {len(mask)} bytes, not {len(shard.tokens)}")
    return mask


@lru_cache(maxsize=MAX_OPEN_INDEXES)
def _load_document_index(shard: TokenShard) -> DocumentIndex:
    starts = np.append(_map_document_offsets(shard) // shard._header[0].itemsize, len(shard.tokens))
    path = shard.stem.with_suffix(".docs.arrow")
    try:
        info_reader = pa.ipc.open_file(pa.memory_map(str(path)))
        sizes = [info_reader.get_batch(number).num_rows for number in range(info_reader.num_record_batches)]
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged_error(path, f"cannot be read ({error})") from error
    if sum(sizes) != len(starts) - 1:
        raise damaged_error(path, f"names {sum(sizes)} documents, not {len(starts) - 1}")
    return DocumentIndex(starts, info_reader, np.cumsum([0, *sizes]))


class TokenStore:
    """One split of a token store: the shards of each source."""

    def __init__(self, directory: Path, split: Split) -> None:
        content = read_manifest(directory, KIND, "z2a tokens build RECIPE")
        self.directory, self.split = directory, split
        if content.get("format") != FORMAT:
            raise Z2aError(f"{directory} was built by another version: run 'z2a tokens build RECIPE' again")
        path = directory / MANIFEST
        try:
            manifest = parse_record(StoreManifest, content, path)
            self.tokenizer_fingerprint = manifest.tokenizer
            self.vocab_size = manifest.vocab_size
            sources = manifest.splits[split]
            self.sources = {name: list(self._shards(source)) for name, source in sources.items()}
        except (Z2aError, KeyError, ValueError) as error:
            raise damaged_error(path, f"is damaged ({type(error).__name__}: {error})") from error
        self.fingerprint = fingerprint({name: source.sha256 for name, source in sources.items()})
        self.shard_tokens = {name: source.shard_tokens for name, source in sources.items()}
        self.kinds: dict[str, SourceKind] = {name: source.kind for name, source in sources.items()}

    def _shards(self, source: SourceShards) -> Iterator[TokenShard]:
        for name, tokens, record in zip(source.shards, source.shard_tokens, source.records, strict=True):
            yield TokenShard(self.directory / self.split / name, ShardManifestEntry(tokens, self.vocab_size, record))

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens of each source."""
        return {name: sum(tokens) for name, tokens in self.shard_tokens.items()}

    def require_kinds(self, objective: ObjectiveRecipe, names: Collection[str]) -> None:
        """Refuse sources that an objective cannot train on, and fine-tuning without what it is for. ``names`` are the
        sources of the mixture; without any, it is all of them."""
        allowed, name_of = objective.kinds, f"train.objective.name={objective.name}"
        kinds = {name: kind for name, kind in self.kinds.items() if not names or name in names}
        needed = "chat" if "chat" in allowed else allowed[0]
        wrong = sorted(name for name, kind in kinds.items() if kind not in allowed)
        if wrong:
            raise Z2aError(
                f"{name_of} trains on sources of kind {' and '.join(allowed)}, but "
                f"{', '.join(f'{name} is of kind {kinds[name]}' for name in wrong)}: set train.mixture, or another kind"
            )
        if objective.conversations != "cut" and not set(kinds.values()) & (set(allowed) - {"text"}):
            raise Z2aError(
                f"{name_of} needs {CONTENT[needed]}, and {self.directory} has none: set kind: "
                f"{needed} on a source, then run 'z2a corpus build RECIPE' and 'z2a tokens build RECIPE'"
            )

    def has_full_sequence(self, seq_len: int) -> bool:
        """Whether any source has ``seq_len`` tokens and the last target."""
        return any(sum(tokens) > seq_len for tokens in self.shard_tokens.values())

    def require_full_sequence(self, seq_len: int) -> None:
        if not self.has_full_sequence(seq_len):
            raise Z2aError("the validation split has no full sequence: raise corpus.holdout or give more text")
