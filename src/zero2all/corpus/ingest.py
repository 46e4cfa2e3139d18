"""A raw file to documents: read, mapped to the schema and given ids, a batch at a time, not cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zero2all.corpus.chat_documents import RecordMapping, record_mapping
from zero2all.corpus.chat_shapes import has_messages
from zero2all.corpus.document import SCHEMA, gid_maker, is_taken, replace_lone_surrogates
from zero2all.corpus.file_stats import FileStats
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

CHAT_IN_TEXT = "a conversation, which needs kind: chat on the source"
_LINE_END = re.compile(r"\r\n?|\n")


def read_documents(file: RawFile, source: SourceRecipe, stats: FileStats) -> Iterator[pa.RecordBatch]:
    """The documents of a file in our schema; records without text are counted in ``stats``."""
    stats.begin_file(file.name)
    mapping = record_mapping(source)
    # The lines before a byte range are not counted, so records without an id are numbered from its start.
    from_byte = file.file_range.start if file.file_range and file.file_range.file_format == "jsonl" else 0
    id_prefix = f"{file.name}#{from_byte}+" if from_byte else f"{file.name}#"
    number = file.file_range.first_row if file.file_range else 0
    try:
        for records in read_record_chunks(file, exclude=source.exclude):
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
    gids = _gids(source.name, _column([row.get("id", "") for row in rows]), content)  # of the text as it came
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


def _gids(data_src: str, own_ids: pa.StringArray, contents: pa.StringArray) -> pa.StringArray:
    """Hashed in the Arrow buffer, without making Python strings again."""
    gid = gid_maker(data_src)
    data = memoryview(contents.buffers()[2])
    ends = _offsets(contents).tolist()
    return pa.array(
        [
            gid(own_id, data[start:stop])
            for own_id, start, stop in zip(own_ids.cast(pa.binary()).to_pylist(), ends, ends[1:], strict=False)
        ],
        pa.string(),
    )


def _offsets(texts: pa.StringArray) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(texts.buffers()[1], dtype=np.int32)[: len(texts) + 1]


def document_texts(paths: list[str]) -> Iterator[str]:
    """The text of every document in some files, mapped by the default field names."""
    source = SourceRecipe(name="text", paths=paths)
    for file in list_files(source):
        for batch in read_documents(file, source, FileStats()):
            yield from batch["content"].to_pylist()
