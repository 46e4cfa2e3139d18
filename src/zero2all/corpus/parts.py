"""The first stage: one raw file to one part, read, mapped to the schema and cleaned.

A part is ``<name>.parquet`` with its record ``<name>.json`` beside it, written last. The record holds the key of all
that the part depends on, so a rerun makes only parts whose file, mapping or filters changed, on any number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.corpus.document import SCHEMA, Document
from zero2all.corpus.filters import apply, build_filters
from zero2all.corpus.mapping import mapping_for
from zero2all.corpus.readers import BrokenRecord, RawFile, Unreadable, WholeFile, list_files, read_records
from zero2all.io import atomic_path, read_json, sha256_file, write_json
from zero2all.recipe import SourceRecipe

ROW_GROUP_BYTES = 8_000_000
SAMPLES_KEPT = 3  # of dropped documents, per reason and part, for the report
SAMPLE_CHARACTERS = 400
PLACES_KEPT = 100  # of broken records, per part


def finished_part(stem: Path, key: str) -> dict[str, Any] | None:
    """The record of a part that is whole and was made from the same things."""
    record_path, data = stem.with_suffix(".json"), stem.with_suffix(".parquet")
    if not record_path.exists() or not data.exists():
        return None
    record: dict[str, Any] = read_json(record_path)
    return record if record["key"] == key and record["sha256"] == sha256_file(data) else None


def make_part(
    file: RawFile, source: SourceRecipe, specs: list[str | dict[str, Any]], stem: Path, key: str
) -> dict[str, Any]:
    """Read a file, clean its documents, write the part, and say what became of everything in it."""
    done = finished_part(stem, key)
    if done is not None:
        return done
    account = Account()
    filters = build_filters(specs)
    with atomic_path(stem.with_suffix(".parquet")) as partial, DocumentWriter(partial) as writer:
        for document in _documents(file, source, account):
            account.read(document)
            outcome = apply(filters, document)
            account.changed.update(outcome.changed_by)
            if outcome.document is None:
                count_drop(account.dropped, document, f"{outcome.dropped_by}: {outcome.reason}")
            else:
                writer.write(outcome.document)
    record = {
        "key": key,
        "source": source.name,
        "file": file.name,
        "documents": writer.documents,
        "bytes": writer.bytes,
        **account.summary(),
        "sha256": sha256_file(stem.with_suffix(".parquet")),
    }
    write_json(stem.with_suffix(".json"), record)
    return record


def _documents(file: RawFile, source: SourceRecipe, account: Account) -> Iterator[Document]:
    mapping = mapping_for(source)
    try:
        for number, record in enumerate(read_records(file)):
            if isinstance(record, BrokenRecord):
                account.broken(record, f"{file.name}#{number}")
                continue
            place = f"{file.name}#{number}"
            document = mapping.document(
                record, source.name, place, source.category, whole=isinstance(record, WholeFile)
            )
            if document is None:
                account.left_out["no text in it"] += 1
            else:
                yield document
    except Unreadable as reason:
        account.unreadable = str(reason)


def document_texts(paths: list[str]) -> Iterator[str]:
    """The text of every document in some files, mapped by the usual names."""
    source = SourceRecipe(name="text", paths=paths)
    for file in list_files(source):
        yield from (document.content for document in _documents(file, source, Account()))


class Account:
    """What became of the documents of one file."""

    def __init__(self) -> None:
        self.read_documents = self.read_bytes = 0
        self.left_out: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.unreadable: str | None = None
        self._places: list[str] = []
        self.dropped: dict[str, dict[str, Any]] = {}

    def read(self, document: Document) -> None:
        self.read_documents += 1
        self.read_bytes += len(document.content.encode())

    def broken(self, record: BrokenRecord, place: str) -> None:
        self.left_out[record.reason] += 1
        if len(self._places) < PLACES_KEPT:
            self._places.append(f"{record.place or place}: {record.reason}")

    def summary(self) -> dict[str, Any]:
        return {
            "read": {"documents": self.read_documents, "bytes": self.read_bytes},
            "left_out": dict(self.left_out),
            "quarantine": self._places,
            "unreadable": self.unreadable,
            "changed": dict(self.changed),
            "dropped": self.dropped,
        }


def count_drop(dropped: dict[str, dict[str, Any]], document: Document, reason: str) -> None:
    """Add a document to the account of a reason; the first few are kept to be looked at."""
    of_reason = dropped.setdefault(reason, {"documents": 0, "bytes": 0, "samples": []})
    of_reason["documents"] += 1
    of_reason["bytes"] += len(document.content.encode())
    if len(of_reason["samples"]) < SAMPLES_KEPT:
        text = document.content[:SAMPLE_CHARACTERS]
        of_reason["samples"].append({"gid": document.gid, "title": document.title, "text": text})


class DocumentWriter:
    """Documents to one Parquet file, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.documents = self.bytes = 0
        self._rows: list[dict[str, str]] = []
        self._pending = 0

    def __enter__(self) -> DocumentWriter:
        self._writer = pq.ParquetWriter(self.path, SCHEMA, compression="zstd")
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._writer.close()

    def write(self, document: Document) -> None:
        size = len(document.content.encode())
        self._rows.append(vars(document))
        self.documents += 1
        self.bytes += size
        self._pending += size
        if self._pending >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._pending = [], 0
