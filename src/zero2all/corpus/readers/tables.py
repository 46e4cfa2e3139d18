"""Tables: Parquet, and text with a header and a separator."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.corpus.readers.base import BrokenRecord, Limits, Unreadable
from zero2all.corpus.readers.encoding import as_utf8
from zero2all.corpus.readers.streams import Stream, lines

ROWS, BATCH_BYTES = 1000, 1 << 20  # at a time; rows of a megabyte exist
SEPARATORS = "\t,;|"


def parquet(
    file: IO[bytes] | pa.BufferReader, first_group: int = 0, last_group: int | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Rows of some row groups in small batches. Arrow is told to read on as it goes: column chunks may be gigabytes."""
    with pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
        number = sum(group.num_rows for group in groups[:first_group])
        for group in range(first_group, len(groups) if last_group is None else last_group):
            average = groups[group].total_byte_size // max(groups[group].num_rows, 1) + 1
            size = min(max(BATCH_BYTES // average, 1), ROWS)
            for batch in table.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
                yield _rows(_without_times(batch), number)
                number += len(batch)


def _rows(batch: pa.RecordBatch, number: int) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_row_or_broken(batch, index, number + index) for index in range(len(batch))]
    for name, kind in zip(batch.schema.names, batch.schema.types, strict=True):
        if "binary" in str(kind):
            for row in rows:
                if isinstance(row.get(name), bytes):
                    row[name] = _text_or_nothing(row[name])
    return rows


def _row_or_broken(batch: pa.RecordBatch, index: int, number: int) -> dict[str, Any]:
    try:
        row: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return BrokenRecord("not UTF-8", f"row {number}")
    return row


def _text_or_nothing(value: bytes) -> str | None:
    """Some tables hold their text as bytes; pictures are no loss."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _without_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times as text: Python's own have no nanoseconds, and ours go to ``others`` as text anyway."""
    columns = [_cast(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _cast(column: pa.Array) -> pa.Array:
    wanted = _timeless(column.type)
    if wanted.equals(column.type):
        return column
    try:
        return column.cast(wanted)
    except pa.ArrowException:  # a span of time, say, which has no text form
        return pa.nulls(len(column))


def _timeless(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _timeless(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_timeless(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_timeless(kind.value_type))
    return kind


def table_text(stream: Stream, limits: Limits) -> Iterator[dict[str, Any]]:
    """Rows under a header. A row that does not fit it is broken, not shifted."""
    csv.field_size_limit(limits.record_bytes)
    source = _Lines(as_utf8(stream), limits)
    header_line = next(source, "")
    separator = max(SEPARATORS, key=header_line.count)
    if not header_line.count(separator):
        raise Unreadable("table without columns")
    try:
        header = [name.strip() for name in next(csv.reader([header_line.lstrip("\ufeff")], delimiter=separator))]
    except csv.Error as error:
        raise Unreadable("table without a header") from error
    if any(not name for name in header[1:]) or len(set(header)) < len(header):
        raise Unreadable("table without a header")
    rows = csv.reader(source, delimiter=separator)
    while True:
        place = f"line {source.number + 1}"
        try:
            row = next(rows, None)
        except csv.Error:
            yield BrokenRecord("broken row", place)
            continue
        if row is None:
            return
        if len(row) == len(header):
            yield dict(zip(header, row, strict=True))
        elif row:
            yield BrokenRecord("row that does not fit the header", place, separator.join(row))


class _Lines:
    """Lines as text for the csv module, which wants their ends kept."""

    def __init__(self, stream: Stream, limits: Limits) -> None:
        self._lines, self.number = lines(stream, limits.record_bytes), 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return "\n" if line is None else line.decode("utf-8", "replace").replace("\0", "")
