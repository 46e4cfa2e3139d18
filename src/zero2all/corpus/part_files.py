"""The first stage: one raw file, or a range of a large one, to one part: read, mapped to the schema and cleaned.

A part is ``<name>.parquet`` with its sidecar ``<name>.json``, written last. The sidecar holds the key of all
that the part depends on, so a rerun writes only parts whose file, mapping or filters changed, on any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.corpus.document import SCHEMA, Document
from zero2all.corpus.file_stats import FileStats, count_drop
from zero2all.corpus.filters import BoundFilter, apply_filters, build_filters
from zero2all.corpus.ingest import read_documents
from zero2all.corpus.manifest import DroppedDocuments, ReadCounts
from zero2all.corpus.readers import RawFile
from zero2all.io import atomic_path, read_finished, sha256_file, write_record
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import source_file_name

ROW_GROUP_BYTES = 8_000_000


@dataclass(frozen=True)
class PartTask:
    """A raw file of a source, or a range of a large one, to be written as a part."""

    source: SourceRecipe
    file: RawFile
    key: str
    """Fingerprint of everything that the part depends on."""


@dataclass(frozen=True)
class PartRecord:
    """The sidecar of a part."""

    key: str
    source: str
    file: str
    documents: int
    bytes: int
    read: ReadCounts
    left_out: dict[str, int]
    """Records that gave no document, by reason."""
    quarantine: list[str]
    """Where broken records are, each with its reason."""
    unreadable: str | None
    """Why the file was not read to its end."""
    changed: dict[str, int]
    """Documents by the filter that changed them."""
    dropped: dict[str, DroppedDocuments]
    """By reason."""
    sha256: str


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


def write_part(task: PartTask, specs: list[str | dict[str, Any]], directory: Path) -> PartRecord:
    """Read a file, clean its documents, write the part, and return its sidecar. A finished part is kept."""
    data = part_path(directory, task.source.name, task.key)
    sidecar = data.with_suffix(".json")
    done = read_finished(PartRecord, sidecar, task.key, lambda record: record.sha256 == sha256_file(data))
    if done is not None:
        return done
    stats = FileStats()
    filters = build_filters(specs)
    with atomic_path(data) as partial, DocumentWriter(partial) as writer:
        for batch in read_documents(task.file, task.source, stats):
            writer.write(apply_filters_to_batch(batch, filters, stats) if filters else batch)
    record = PartRecord(
        key=task.key,
        source=task.source.name,
        file=task.file.name,
        documents=writer.documents,
        bytes=writer.bytes,
        read=stats.read,
        left_out=dict(stats.skipped),
        quarantine=stats.quarantine,
        unreadable=stats.unreadable,
        changed=dict(stats.changed),
        dropped=stats.dropped,
        sha256=sha256_file(data),
    )
    write_record(sidecar, record)
    return record


def apply_filters_to_batch(batch: pa.RecordBatch, filters: Sequence[BoundFilter], stats: FileStats) -> pa.RecordBatch:
    """The documents that pass the filters, with their changes."""
    kept, contents = [], []
    is_changed = False
    for number, row in enumerate(batch.to_pylist()):
        document = Document(**row)
        outcome = apply_filters(filters, document)
        stats.changed.update(outcome.changed_by)
        if outcome.document is None:
            count_drop(stats.dropped, document, f"{outcome.dropped_by}: {outcome.reason}")
        else:
            kept.append(number)
            contents.append(outcome.document.content)
            is_changed |= bool(outcome.changed_by)
    if len(kept) < len(batch):
        batch = batch.take(pa.array(kept, pa.int64()))
    if is_changed:
        column = SCHEMA.get_field_index("content")
        batch = batch.set_column(column, SCHEMA.field(column), pa.array(contents, pa.string()))
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
        if self._pending >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, SCHEMA))
        self._batches, self._pending = [], 0
