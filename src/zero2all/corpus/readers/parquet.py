"""Rows of Parquet files, in memory bounded by what the rows decode to, not by the size of the file.

A value that repeats costs a Parquet file next to nothing: a megabyte once in a dictionary, and a few bytes that say
"four thousand times". So the longest value in the dictionary of a column limits how many rows are decoded at once.
Where that would be too few, the column is read as a dictionary, how large each row will be is known from the lengths
in it, and only some rows at a time are decoded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from zero2all.base.plugins import register
from zero2all.corpus.readers.base import BrokenRecord, ReadLimits, RecordChunk
from zero2all.corpus.readers.parquet_footer import RowGroup, read_row_groups

BATCH_ROWS, BATCH_BYTES = 1000, 1 << 20  # at a time; rows of a megabyte exist
DICTIONARY_ROWS, DICTIONARY_BATCH_BYTES = 10_000, 8 << 20  # the same for rows that are not decoded yet
DECODED_BYTES = 32 << 20  # of the text of a batch that is decoded at once, if every value is the longest
MIN_BATCH_ROWS = 64  # in a batch, at least; with fewer, dictionaries are cheaper
VALUE_BYTES = 8  # of a number or of a place in a list, at least

RowSizes = NDArray[np.int64]


@register("reader", "parquet", extensions=(".parquet",), magic=b"PAR1", seekable=True, chunked=True)
def read_parquet_file(file: IO[bytes], name: str, limits: ReadLimits) -> Iterator[RecordChunk]:
    """Every row of a Parquet file."""
    return read_parquet(file, limits)


def read_parquet(
    file: IO[bytes] | pa.BufferReader, limits: ReadLimits, first_group: int = 0, last_group: int | None = None
) -> Iterator[RecordChunk]:
    """Rows of some row groups in small batches. Arrow streams: column chunks may be gigabytes."""
    size = file.seek(0, 2)
    file.seek(0)
    metadata = pq.read_metadata(file)
    groups = read_row_groups(file, metadata.num_columns)
    first_row = sum(group.num_rows for group in groups[:first_group])
    for group in range(first_group, len(groups) if last_group is None else last_group):
        yield from _read_row_group(_RowGroupFile(file, metadata, group, groups[group]), first_row, size, limits)
        first_row += groups[group].num_rows


@dataclass(frozen=True)
class _RowGroupFile:
    """One row group of a file."""

    file: IO[bytes] | pa.BufferReader
    metadata: pq.FileMetaData
    number: int
    group: RowGroup

    def batches(self, rows: int, dictionaries: list[str], columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        table = pq.ParquetFile(
            self.file, metadata=self.metadata, read_dictionary=dictionaries, buffer_size=1 << 20, pre_buffer=False
        )
        return iter(table.iter_batches(batch_size=rows, row_groups=[self.number], columns=columns, use_threads=False))


@dataclass(frozen=True)
class _RowGroupReadOptions:
    """How to read one row group."""

    dictionaries: list[str]
    """Columns to read as dictionaries; that costs several times the CPU of decoding them at once."""
    batch_rows: int
    """In one batch."""


def _choose_read_options(part: _RowGroupFile) -> _RowGroupReadOptions:
    """Text is decoded at once where its dictionary has no large values: then the rows of a batch cannot be large."""
    group, text = part.group, _text_columns(part)
    average = group.total_byte_size // max(group.num_rows, 1) + 1
    in_one_batch = min(DICTIONARY_BATCH_BYTES // average, DICTIONARY_ROWS)
    # A group that is one batch has its dictionaries read once either way.
    longest = {} if group.num_rows <= in_one_batch else _longest_values(part, text)
    decoded = {path: length for path, length in longest.items() if length <= DECODED_BYTES // MIN_BATCH_ROWS}
    dictionaries = [path for path in text if path not in decoded]
    # Every batch brings its dictionaries along, so fewer batches are cheaper.
    rows = in_one_batch if dictionaries else min(BATCH_BYTES // average, BATCH_ROWS)
    rows = min(rows, DECODED_BYTES // (sum(decoded.values()) + 1))
    # A delta is decoded as it is read. One value is at most all that the column has, and each may be that one.
    largest = max((column.total_uncompressed_size for column in group.columns if column.is_delta), default=0)
    return _RowGroupReadOptions(dictionaries, max(min(rows, 64 * BATCH_BYTES // (largest + 1)), 1))


def _text_columns(part: _RowGroupFile) -> list[str]:
    """Columns of text, but those in an encoding that Arrow cannot read as a dictionary."""
    schema = part.metadata.schema
    return [
        schema.column(number).path
        for number, column in enumerate(part.group.columns)
        if schema.column(number).physical_type == "BYTE_ARRAY" and not column.is_delta
    ]


def _longest_values(part: _RowGroupFile, text: list[str]) -> dict[str, int]:
    """The length of the longest value in the dictionary of each column of text that has one value a row.

    From the dictionary itself, which comes with the first row: what the metadata say of it proves nothing. In lists
    one row may have all values, so how long each is bounds nothing.
    """
    flat = set(part.metadata.schema.to_arrow_schema().names)
    # Two columns may have the same path, and the dictionary of one says nothing of the other.
    names = [path for path, columns in Counter(text).items() if columns == 1 and path in flat]
    first = next(part.batches(1, names, names), None) if names else None
    if first is None:
        return {}
    return {
        name: int(row_sizes(column.dictionary).max(initial=0))
        for name, column in zip(first.schema.names, first.columns, strict=True)
        if pa.types.is_dictionary(column.type)
    }


def _read_row_group(part: _RowGroupFile, first_row: int, file_size: int, limits: ReadLimits) -> Iterator[RecordChunk]:
    """The rows of one group, unless they are more than its bytes can plausibly hold."""
    columns = part.group.columns
    packed = min(sum(column.total_compressed_size for column in columns), file_size)
    decoded = sum(max(column.total_uncompressed_size, 4 * column.num_values) for column in columns)
    if problem := limits.unpacked_problem(decoded, packed, sys.maxsize):
        yield [BrokenRecord(problem, f"row group {part.number}")]
        return
    decoded = 0
    options = _choose_read_options(part)
    for batch in part.batches(options.batch_rows, options.dictionaries):
        sizes = sum((row_sizes(column) for column in batch.columns), np.zeros(len(batch), dtype=np.int64))
        too_large = sizes > limits.record_bytes
        sizes[too_large] = 0
        reserved = sum((row_sizes(column, mean=True) for column in batch.columns), np.zeros(len(batch), dtype=np.int64))
        split_points = np.union1d(_split_points(sizes, BATCH_BYTES), _split_points(reserved, DECODED_BYTES))
        for places in np.split(np.arange(len(batch)), split_points):
            decoded += int(sizes[places].sum())
            if problem := limits.unpacked_problem(decoded, packed, sys.maxsize):
                yield [BrokenRecord(problem, f"row group {part.number}")]
                return
            yield _decode_rows(batch, places, too_large[places], first_row, limits)
        first_row += len(batch)


def _split_points(sizes: RowSizes, limit: int) -> NDArray[np.intp]:
    """Where to split rows so that each part has about ``limit`` bytes, or one row."""
    part = (np.cumsum(sizes) - sizes) // limit
    return np.flatnonzero(part[1:] != part[:-1]) + 1


def row_sizes(column: pa.Array, *, mean: bool = False) -> RowSizes:
    """Bytes of every row once dictionaries are decoded.

    With ``mean``, every value of a dictionary counts as its mean one: that is what Arrow allocates to decode them.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        lengths = np.append(row_sizes(column.dictionary), 0)
        if mean:
            lengths[:] = lengths.sum() // max(len(lengths) - 1, 1)
        known = column.indices.drop_null().to_numpy(zero_copy_only=False)
        if len(known) and not 0 <= known.min() <= known.max() < len(column.dictionary):  # Arrow did not look
            raise pa.ArrowInvalid("a value that is not in its dictionary")
        places = column.indices.fill_null(len(lengths) - 1).to_numpy(zero_copy_only=False)
        return np.asarray(lengths[places], dtype=np.int64)
    if pa.types.is_struct(kind):
        fields = (row_sizes(field, mean=mean) for field in column.flatten())
        return sum(fields, np.zeros(len(column), dtype=np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        before = np.concatenate([[0], np.cumsum(row_sizes(column.values, mean=mean) + VALUE_BYTES)])
        ends = column.offsets.to_numpy(zero_copy_only=False)
        return np.asarray(before[ends[1:]] - before[ends[:-1]], dtype=np.int64)
    if pa.types.is_fixed_size_list(kind):
        every = row_sizes(column.values.slice(column.offset * kind.list_size, len(column) * kind.list_size), mean=mean)
        return np.asarray(every.reshape(len(column), kind.list_size).sum(axis=1), dtype=np.int64)
    try:
        lengths = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    except pa.ArrowNotImplementedError:  # not text
        return np.full(len(column), VALUE_BYTES, dtype=np.int64)
    return np.asarray(lengths, dtype=np.int64)


def _decode_rows(
    batch: pa.RecordBatch, places: NDArray[np.intp], too_large: NDArray[np.bool_], first_row: int, limits: ReadLimits
) -> RecordChunk:
    # Taken, not sliced: a slice of lists keeps the values of all rows, and they would all be decoded.
    kept = places[~too_large]
    rows = iter(
        _to_records(
            _decode_dictionaries(batch.take(pa.array(kept, pa.int64()))), [first_row + int(place) for place in kept]
        )
    )
    large = f"row larger than {limits.record_bytes >> 20} MiB"
    return [
        BrokenRecord(large, f"row {first_row + int(place)}") if is_skipped else next(rows)
        for place, is_skipped in zip(places, too_large, strict=True)
    ]


def _to_records(batch: pa.RecordBatch, numbers: list[int]) -> RecordChunk:
    try:
        rows: RecordChunk = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [row for index, number in enumerate(numbers) for row in _decode_row(batch, index, number)]
    for name, kind in zip(batch.schema.names, batch.schema.types, strict=True):
        if "binary" in str(kind):
            for row in rows:
                if not isinstance(row, BrokenRecord) and isinstance(row.get(name), bytes):
                    row[name] = _decode_or_none(row[name])
    return rows


def _decode_row(batch: pa.RecordBatch, index: int, number: int) -> RecordChunk:
    try:
        row: RecordChunk = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError:
        return [BrokenRecord("not UTF-8", f"row {number}")]
    return row


def _decode_or_none(value: bytes) -> str | None:
    """Some tables hold their text as bytes; pictures are no loss."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _decode_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Dictionaries decoded, and times as text: Python's own have no nanoseconds, and they go to ``others`` anyway."""
    columns = [_cast(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _cast(column: pa.Array) -> pa.Array:
    wanted = _decoded_type(column.type)
    if wanted.equals(column.type):
        return column
    try:
        return column.cast(wanted)
    except pa.ArrowException:  # a span of time, say, which has no text form
        return pa.nulls(len(column))


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _decoded_type(kind.value_type)
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _decoded_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_decoded_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_decoded_type(kind.value_type))
    return kind
