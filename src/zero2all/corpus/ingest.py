"""A raw file to documents: read, mapped to the schema, given ids and counted, a batch at a time, not cleaned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import starmap
from operator import is_

import pyarrow as pa
import pyarrow.compute as pc

from zero2all.corpus.chat_documents import RecordMapping, record_mapping
from zero2all.corpus.chat_shapes import has_messages
from zero2all.corpus.document import SCHEMA, Document, gid_maker, is_taken, replace_lone_surrogates
from zero2all.corpus.manifest import DroppedDocuments, Example, ReadCounts, SkippedFiles
from zero2all.corpus.mapping import AUTOMATIC
from zero2all.corpus.readers import (
    NOT_TAKEN,
    BrokenRecord,
    RawFile,
    RecordChunk,
    TextRecord,
    UnreadableFileError,
    UnreadableItemError,
    list_files,
    read_record_chunks,
)
from zero2all.recipe import SourceRecipe

MAX_DROPPED_EXAMPLES_PER_PART = 3  # of dropped documents, per reason and part, for the report
EXAMPLE_CHARACTERS = 400
MAX_QUARANTINED_PER_PART = 100  # of broken records, per part
CHAT_IN_TEXT = "a conversation, which needs kind: chat on the source"
_LINE_END = re.compile(r"\r\n?|\n")


class FileStats:
    """Counts over the files of a part, which are read one after the other."""

    def __init__(self) -> None:
        self.begin_file("")
        self._documents_read = self._bytes_read = self.unpacked = 0
        self.skipped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.record_files: dict[str, SkippedFiles] = {}
        self.unreadable: dict[str, SkippedFiles] = {}
        self.quarantine: list[str] = []
        self.dropped: dict[str, DroppedDocuments] = {}

    @property
    def read(self) -> ReadCounts:
        return ReadCounts(self._documents_read, self._bytes_read)

    def count_read(self, documents: int, size: int) -> None:
        self._documents_read += documents
        self._bytes_read += size

    def begin_file(self, name: str) -> None:
        self._file, self._file_reasons = name, set[str]()

    def count_unreadable(self, reason: str) -> None:
        self.unreadable.setdefault(reason, SkippedFiles()).add([self._file])

    def count_skipped(self, reason: str, records: int = 1) -> None:
        self.skipped[reason] += records
        if reason not in self._file_reasons:
            self._file_reasons.add(reason)
            self.record_files.setdefault(reason, SkippedFiles()).add([self._file])

    def count_broken(self, record: BrokenRecord, place: str) -> None:
        self.count_skipped(record.reason)
        if len(self.quarantine) < MAX_QUARANTINED_PER_PART:
            self.quarantine.append(f"{record.place or place}: {record.reason}")


def count_drop(dropped: dict[str, DroppedDocuments], document: Document, reason: str) -> None:
    """Count a dropped document under its reason; the first few are kept as examples."""
    of_reason = dropped.setdefault(reason, DroppedDocuments())
    of_reason.documents += 1
    of_reason.bytes += len(document.content.encode())
    if len(of_reason.samples) < MAX_DROPPED_EXAMPLES_PER_PART:
        of_reason.samples.append(Example.from_document(document, EXAMPLE_CHARACTERS))


def read_documents(file: RawFile, source: SourceRecipe, stats: FileStats) -> Iterator[pa.RecordBatch]:
    """The documents of a file in our schema; records without text are counted in ``stats``."""
    stats.begin_file(file.name)
    mapping = record_mapping(source)
    # The lines before a byte range are not counted, so records without an id are numbered from its start.
    from_byte = file.file_range.start if file.file_range and file.file_range.file_format == "jsonl" else 0
    id_prefix = f"{file.name}#{from_byte}+" if from_byte else f"{file.name}#"
    number = file.file_range.first_row if file.file_range else 0
    try:
        for records in read_record_chunks(file, exclude=source.exclude, reader=source.reader):
            batch = to_record_batch(records, mapping, source, id_prefix, number, stats)
            number += len(records)
            if len(batch):
                yield batch
    except UnreadableFileError as reason:
        stats.count_unreadable(str(reason))


def to_record_batch(
    records: RecordChunk,
    mapping: RecordMapping,
    source: SourceRecipe,
    id_prefix: str,
    first_number: int,
    stats: FileStats,
) -> pa.RecordBatch:
    """Records in our schema. One without its own id gets ``id_prefix`` and its number, from ``first_number``."""
    rows: list[dict[str, str]] = []
    ids: list[str] = []
    file_name = id_prefix.rpartition("#")[0]
    for number, record in enumerate(records, first_number):
        if isinstance(record, BrokenRecord):
            if record.place and not record.place.startswith(file_name):
                record.place = f"{file_name} {record.place}"
            stats.count_broken(record, f"{id_prefix}{number}")
            continue
        # A file that is one text became a record with the default field names, to which a recipe's rules do not apply.
        try:
            is_text = isinstance(record, TextRecord) and source.kind == "text"
            row = (AUTOMATIC if is_text else mapping).map_record(record)
        except UnreadableItemError as reason:
            stats.count_broken(BrokenRecord(str(reason)), f"{id_prefix}{number}")
            continue
        if row is None:
            stats.count_skipped(CHAT_IN_TEXT if has_messages(record) else "no text in it")
        else:
            rows.append(row)
            ids.append(row.get("id") or f"{id_prefix}{number}")
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    texts = [row["content"] for row in rows]
    content = _column(texts)
    own_ids = _column([row.get("id", "") for row in rows])
    own = zip(own_ids.cast(pa.binary()).to_pylist(), content.cast(pa.binary()).to_pylist(), strict=True)
    gids = pa.array(starmap(gid_maker(source.name), own), pa.string())  # of the text as it came
    stripped = [strip_blank_lines(text) for text in texts]
    columns = [
        gids,
        _column(ids),
        pa.repeat(source.name, len(rows)),
        _column([row.get("category") or source.category for row in rows]),
        _column([row.get("title", "") for row in rows]),
        content if all(map(is_, stripped, texts)) else _column(stripped),
        _column([row.get("desc", "") for row in rows]),
        _column([row["others"] for row in rows]),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    if isinstance(source.take, float):
        batch = batch.filter(pa.array([is_taken(gid, source.take) for gid in gids.to_pylist()], pa.bool_()))
        if len(batch) < len(rows):
            stats.count_skipped(NOT_TAKEN, len(rows) - len(batch))
    stats.count_read(len(batch), pc.sum(pc.binary_length(batch["content"])).as_py() or 0)
    return batch


def strip_blank_lines(text: str) -> str:
    """Without the blank lines at both ends. The first line keeps its indentation, the last one its line end.

    >>> strip_blank_lines("\\n \\n  first\\n\\nlast\\n\\n")
    '  first\\n\\nlast\\n'
    """
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    start = max(text.rfind("\n", 0, first), text.rfind("\r", 0, first)) + 1
    line_end = _LINE_END.search(text, last)
    return text[start : line_end.end()] if line_end else text[start:]


def _column(texts: Sequence[str]) -> pa.StringArray:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array([replace_lone_surrogates(text) for text in texts], pa.string())


def document_texts(paths: list[str]) -> Iterator[str]:
    """The text of every document in some files, mapped by the default field names."""
    source = SourceRecipe(name="text", paths=paths)
    for file in list_files(source):
        for batch in read_documents(file, source, FileStats()):
            yield from batch["content"].to_pylist()
