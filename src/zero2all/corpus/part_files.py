"""The first stage: raw files to parts, read, mapped to the schema and cleaned.

A large file is several parts; small ones share a part.

A part is ``<name>.parquet`` with its sidecar ``<name>.json``, written last. The sidecar holds the key of all that the
part depends on, so a rerun writes only parts whose files, mapping or filters changed, on any number of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.base.io import atomic_path, fingerprint, sha256_file, write_record
from zero2all.base.manifest import read_finished
from zero2all.base.plugins import BoundPlugin
from zero2all.corpus.chat_documents import filter_example
from zero2all.corpus.document import SCHEMA, Document
from zero2all.corpus.filters import FilterOutcome, apply_filters, build_filters
from zero2all.corpus.ingest import FileStats, count_drop, read_documents
from zero2all.corpus.manifest import DroppedDocuments, ReadCounts, SkippedFiles
from zero2all.corpus.readers import RawFile, ReadLimits
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import source_file_name

ROW_GROUP_BYTES = 8_000_000
MAX_PENDING_BATCHES = 256  # a batch of one short document takes kilobytes
SMALL_FILE_BYTES = 256_000  # below, files share a part
GROUP_BYTES = 8_000_000  # of small files in a part
# Over the files of a part together, so that many small bombs do not add up.
PART_LIMITS = ReadLimits(ratio_check_bytes=2**30)
GROUP_FILES, MAX_GROUP_FILES = 256, 2048  # small files in a part: on average, and at most


@dataclass(frozen=True)
class PartTask:
    """Raw files of a source, or a range of a large one, to be written as a part."""

    source: SourceRecipe
    files: tuple[RawFile, ...]
    key: str
    """Fingerprint of everything that the part depends on."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def without_files(self, reason: str) -> PartTask:
        """A part whose files are counted and not read, under another key: a later build tries them again."""
        files = tuple(replace(file, skip_reason=reason) for file in self.files)
        return replace(self, files=files, key=fingerprint([self.key, reason]))


@dataclass(frozen=True)
class PartRecord:
    """The sidecar of a part."""

    key: str
    source: str
    files: int
    """Raw files; a large one counts in the first of its parts."""
    documents: int
    bytes: int
    read: ReadCounts
    left_out: dict[str, int]
    """Records that gave no document, by reason."""
    quarantine: list[str]
    """Where broken records are, each with its reason."""
    record_files: dict[str, SkippedFiles]
    """Files with such records, by reason."""
    unreadable: dict[str, SkippedFiles]
    """Files that were not read to their end, by reason."""
    changed: dict[str, int]
    """Documents by the filter that changed them."""
    dropped: dict[str, DroppedDocuments]
    """Dropped documents by reason."""
    sha256: str
    unpacked: int = 0
    """Bytes of the records in memory, with all their fields; 0 in sidecars of versions that did not count."""


@dataclass(frozen=True)
class PartFile:
    """A part with documents on its way to the shards."""

    record: PartRecord
    path: Path
    """Its file, or the copy that a later stage changed."""
    drop_files: Sequence[Path] = ()
    """They name its documents to drop."""


def part_path(directory: Path, source: str, key: str) -> Path:
    return directory / f"{source_file_name(source)}-{key}.parquet"


def group_small_files(files: Iterable[RawFile]) -> Iterator[tuple[RawFile, ...]]:
    """Consecutive small files in groups, every other file alone.

    Writing a part takes milliseconds, and every later stage opens it. A group ends where the hash of a name says so:
    an added or removed file changes one group, and the parts of the others are kept.
    """
    group: list[RawFile] = []
    size = 0
    for file in files:
        is_small = file.bytes < SMALL_FILE_BYTES and file.file_range is None
        if is_small:
            group.append(file)
            size += file.bytes
        is_full = size >= GROUP_BYTES or len(group) >= MAX_GROUP_FILES
        if group and (not is_small or is_full or file.name_hash % GROUP_FILES == 0):
            yield tuple(group)
            group, size = [], 0
        if not is_small:
            yield (file,)
    if group:
        yield tuple(group)


def write_part(task: PartTask, specs: list[str | dict[str, Any]], directory: Path) -> PartRecord:
    """Read files, clean their documents, write the part, and return its sidecar. A finished part is kept."""
    data = part_path(directory, task.source.name, task.key)
    sidecar = data.with_suffix(".json")
    done = read_finished(PartRecord, sidecar, task.key, lambda record: record.sha256 == sha256_file(data))
    if done is not None:
        return done
    stats = FileStats()
    filters = build_filters(specs)
    kind = task.source.kind
    apply = apply_filters if kind == "text" else partial(filter_example, kind)
    with atomic_path(data) as partial_path, DocumentWriter(partial_path) as writer:
        for batch in _read_files(task, stats):
            writer.write(apply_filters_to_batch(batch, filters, stats, apply) if filters else batch)
    record = PartRecord(
        key=task.key,
        source=task.source.name,
        files=sum(file.file_range is None or file.file_range.start == 0 for file in task.files),
        documents=writer.documents,
        bytes=writer.bytes,
        read=stats.read,
        left_out=dict(stats.skipped),
        quarantine=stats.quarantine,
        record_files=stats.record_files,
        unreadable=stats.unreadable,
        changed=dict(stats.changed),
        dropped=stats.dropped,
        sha256=sha256_file(data),
        unpacked=stats.unpacked,
    )
    write_record(sidecar, record)
    return record


def _read_files(task: PartTask, stats: FileStats) -> Iterator[pa.RecordBatch]:
    """The documents of all files, as long as they are not more than the files can plausibly hold."""
    problem = ""
    for file in task.files:
        for batch in read_documents(replace(file, skip_reason=file.skip_reason or problem), task.source, stats):
            stats.unpacked += batch.nbytes
            problem = PART_LIMITS.unpacked_problem(stats.unpacked, task.bytes, sys.maxsize)
            if problem:
                stats.count_unreadable(problem)
                break
            yield batch


def apply_filters_to_batch(
    batch: pa.RecordBatch,
    filters: Sequence[BoundPlugin],
    stats: FileStats,
    apply: Callable[[Sequence[BoundPlugin], Document], FilterOutcome] = apply_filters,
) -> pa.RecordBatch:
    """The documents that pass the filters, with their changes."""
    kept: list[int] = []
    changed: dict[str, list[str]] = {"content": [], "others": []}
    is_changed = False
    for number, row in enumerate(batch.to_pylist()):
        document = Document(**row)
        outcome = apply(filters, document)
        stats.changed.update(outcome.changed_by)
        if outcome.document is None:
            count_drop(stats.dropped, document, f"{outcome.dropped_by}: {outcome.reason}")
        else:
            kept.append(number)
            for name, texts in changed.items():
                texts.append(getattr(outcome.document, name))
            is_changed |= bool(outcome.changed_by)
    if len(kept) < len(batch):
        batch = batch.take(pa.array(kept, pa.int64()))
    if is_changed:
        for name, texts in changed.items():
            batch = batch.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), pa.array(texts, pa.string()))
    return batch


class DocumentWriter:
    """Batches of documents to one Parquet file, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.documents = self.bytes = 0
        self._batches: list[pa.RecordBatch] = []
        self._pending = 0

    def __enter__(self) -> DocumentWriter:
        self._writer = pq.ParquetWriter(self.path, SCHEMA, compression="zstd")
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._writer.close()

    def write(self, batch: pa.RecordBatch) -> None:
        size = pc.sum(pc.binary_length(batch["content"])).as_py() or 0
        self._batches.append(batch)
        self.documents += len(batch)
        self.bytes += size
        self._pending += size
        if len(self._batches) > MAX_PENDING_BATCHES:
            self._batches = pa.Table.from_batches(self._batches, SCHEMA).combine_chunks().to_batches()
        if self._pending >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, SCHEMA))
        self._batches, self._pending = [], 0
