"""A raw file to documents: read, mapped to the schema and named, a batch at a time, not cleaned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from zero2all.corpus.account import Account
from zero2all.corpus.document import SCHEMA, clean, gid_maker
from zero2all.corpus.mapping import AUTOMATIC, FieldMapping, mapping_for
from zero2all.corpus.readers import BrokenRecord, RawFile, Unreadable, WholeFile, list_files, read_batches
from zero2all.recipe import SourceRecipe


def read_documents(file: RawFile, source: SourceRecipe, account: Account) -> Iterator[pa.RecordBatch]:
    """The documents of a file in our schema; what gives none goes into the account."""
    mapping = mapping_for(source)
    # Nobody has counted the lines before a range of bytes, so records without an id are counted from there.
    from_byte = file.piece.start if file.piece and file.piece.kind == "jsonl" else 0
    place = f"{file.name}#{from_byte}+" if from_byte else f"{file.name}#"
    number = file.piece.first_row if file.piece else 0
    try:
        for records in read_batches(file, exclude=source.exclude):
            batch = to_batch(records, mapping, source, place, number, account)
            number += len(records)
            if len(batch):
                yield batch
    except Unreadable as reason:
        account.unreadable = str(reason)


def to_batch(
    records: Sequence[dict[str, Any]],
    mapping: FieldMapping,
    source: SourceRecipe,
    place: str,
    first: int,
    account: Account,
) -> pa.RecordBatch:
    """Records in our schema. One without an id of its own is named by its place and its number from ``first`` on."""
    rows: list[dict[str, str]] = []
    places: list[str] = []
    for number, record in enumerate(records, first):
        if isinstance(record, BrokenRecord):
            account.broken(record, f"{place}{number}")
            continue
        # A file that is one text was made into a record in the usual names, to which a recipe's rules do not apply.
        row = (AUTOMATIC if isinstance(record, WholeFile) else mapping).row(record)
        if row is None:
            account.left_out["no text in it"] += 1
        else:
            rows.append(row)
            places.append(row.get("id") or f"{place}{number}")
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    content = _column([row["content"] for row in rows])
    account.read(len(rows), int(_offsets(content)[-1]))
    columns = [
        _gids(source.name, _column([row.get("id", "") for row in rows]), content),
        _column(places),
        pa.repeat(source.name, len(rows)),
        _column([row.get("category") or source.category for row in rows]),
        _column([row.get("title", "") for row in rows]),
        content,
        _column([row.get("desc", "") for row in rows]),
        _column([row["others"] for row in rows]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _column(texts: Sequence[str]) -> pa.StringArray:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array([clean(text) for text in texts], pa.string())


def _gids(data_src: str, own_ids: pa.StringArray, contents: pa.StringArray) -> pa.StringArray:
    """Hashed where the text lies, without making Python strings of it again."""
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
    """The text of every document in some files, mapped by the usual names."""
    source = SourceRecipe(name="text", paths=paths)
    for file in list_files(source):
        for batch in read_documents(file, source, Account()):
            yield from batch["content"].to_pylist()
