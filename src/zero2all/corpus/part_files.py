"""The first stage: one raw file, or a range of a large one, to one part: read, mapped to the schema and cleaned.

A part is ``<name>.parquet`` with its sidecar ``<name>.json``, written last. The sidecar holds the key of all
that the part depends on, so a rerun writes only parts whose file, mapping or filters changed, on any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.corpus.document import SCHEMA, Document
from zero2all.corpus.file_stats import FileStats, count_drop
from zero2all.corpus.filters import BoundFilter, apply_filters, build_filters
from zero2all.corpus.ingest import read_documents
from zero2all.corpus.readers import RawFile
from zero2all.io import atomic_path, read_json, sha256_file, write_json
from zero2all.recipe import SourceRecipe

ROW_GROUP_BYTES = 8_000_000


def find_finished_part(stem: Path, key: str) -> dict[str, Any] | None:
    """The sidecar of a part that is complete and was made from the same inputs."""
    sidecar_path, data = stem.with_suffix(".json"), stem.with_suffix(".parquet")
    if not sidecar_path.exists() or not data.exists():
        return None
    sidecar: dict[str, Any] = read_json(sidecar_path)
    return sidecar if sidecar["key"] == key and sidecar["sha256"] == sha256_file(data) else None


def write_part(
    file: RawFile, source: SourceRecipe, specs: list[str | dict[str, Any]], stem: Path, key: str
) -> dict[str, Any]:
    """Read a file, clean its documents, write the part, and return its sidecar."""
    done = find_finished_part(stem, key)
    if done is not None:
        return done
    stats = FileStats()
    filters = build_filters(specs)
    with atomic_path(stem.with_suffix(".parquet")) as partial, DocumentWriter(partial) as writer:
        for batch in read_documents(file, source, stats):
            writer.write(apply_filters_to_batch(batch, filters, stats) if filters else batch)
    sidecar = {
        "key": key,
        "source": source.name,
        "file": file.name,
        "documents": writer.documents,
        "bytes": writer.bytes,
        **stats.summary(),
        "sha256": sha256_file(stem.with_suffix(".parquet")),
    }
    write_json(stem.with_suffix(".json"), sidecar)
    return sidecar


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
