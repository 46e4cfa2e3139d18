"""Row groups in the footer of a Parquet file, read without Arrow's accessors, which may end the process.

``pyarrow`` checks a column chunk when ``RowGroupMetaData.column`` makes it, and no handler is around that check: a
damaged byte in the statistics of a column aborts the process ("terminate called after throwing an instance of
'parquet::ParquetException'"). Where Arrow reads the column itself, the same check raises an exception. So what is
needed before that is read here: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
in Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

MAX_FOOTER_BYTES = 32 << 20  # of 250,000 column chunks; half a microsecond a byte, 17 s in all
TAIL_BYTES = 8  # the length of the footer, and the magic
MAX_DEPTH = 16  # of what is skipped; the format has six levels
MAX_VARINT_BITS = 63
LONG_LIST = 15  # its size follows
DELTA_ENCODINGS = frozenset({5, 6, 7})
# Types of values in the compact protocol.
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _, STRUCT = range(1, 13)
FIXED_BYTES = {BYTE: 1, DOUBLE: 8}


@dataclass(frozen=True)
class ColumnChunk:
    num_values: int
    total_uncompressed_size: int
    total_compressed_size: int
    is_delta: bool
    """Whether some of it is in an encoding of differences, which Arrow cannot read as a dictionary."""


@dataclass(frozen=True)
class RowGroup:
    num_rows: int
    total_byte_size: int
    columns: list[ColumnChunk]


def read_row_groups(file: IO[bytes] | pa.BufferReader, columns: int) -> list[RowGroup]:
    """All row groups. Raises ValueError where a group is damaged or has another number of columns than the schema."""
    end = file.seek(-TAIL_BYTES, 2)
    length = int.from_bytes(file.read(TAIL_BYTES)[:4], "little")
    if length > min(end, MAX_FOOTER_BYTES):
        raise ValueError("the footer is too large")
    file.seek(end - length)
    reader = _CompactReader(file.read(length))
    try:
        groups = [_read_group(reader) for _ in reader.fields({4: LIST}) for _ in reader.items(STRUCT)]
    except IndexError:
        raise ValueError("the footer is cut off") from None
    if any(len(group.columns) != columns for group in groups):
        raise ValueError("a row group has other columns than the schema")
    return groups


def _read_group(reader: _CompactReader) -> RowGroup:
    numbers, columns = {2: 0, 3: 0}, []
    for field in reader.fields({1: LIST, 2: I64, 3: I64}):
        if field == 1:
            columns += [_read_column(reader) for _ in reader.items(STRUCT)]
        else:
            numbers[field] = reader.count()
    return RowGroup(numbers[3], numbers[2], columns)


def _read_column(reader: _CompactReader) -> ColumnChunk:
    """Its ``meta_data``; without that it is encrypted, and Arrow will say so."""
    numbers, encodings = {5: 0, 6: 0, 7: 0}, set[int]()
    for _ in reader.fields({3: STRUCT}):
        for field in reader.fields({2: LIST, 5: I64, 6: I64, 7: I64}):
            if field == 2:
                encodings |= {reader.count() for _ in reader.items(I32)}
            else:
                numbers[field] = reader.count()
    return ColumnChunk(numbers[5], numbers[6], numbers[7], not DELTA_ENCODINGS.isdisjoint(encodings))


class _CompactReader:
    """Values one after another. Whatever is read past the end raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > MAX_VARINT_BITS:
                raise ValueError("a number that is too long")

    def count(self) -> int:
        """A number that is not negative: of rows or bytes."""
        value = self.varint()
        if value & 1:
            raise ValueError("a negative size")
        return value >> 1

    def fields(self, wanted: dict[int, int], depth: int = 0) -> Iterator[int]:
        """The numbers of those fields of a struct that are wanted with this type; the caller reads them."""
        number = 0
        while head := self._byte():
            kind, step = head & 0x0F, head >> 4
            if step:
                number += step
            else:
                code = self.varint()
                number = (code >> 1) ^ -(code & 1)
            if wanted.get(number) == kind:
                yield number
            elif kind not in (TRUE, FALSE):  # these are values themselves
                self._skip(kind, depth)

    def items(self, wanted: int) -> range:
        """The indices of a list, which must be of this type."""
        kind, size = self._list_head()
        if kind != wanted:
            raise ValueError("a list of another type")
        return range(size)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        return head & 0x0F, self._size(self.varint() if head >> 4 == LONG_LIST else head >> 4)

    def _size(self, size: int) -> int:
        """Check the size of something of which every part takes at least a byte."""
        if size > len(self.data) - self.at:
            raise ValueError("more than the footer holds")
        return size

    def _skip(self, kind: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        if kind in FIXED_BYTES:
            self.at += FIXED_BYTES[kind]
        elif kind in (I16, I32, I64):
            self.varint()
        elif kind == BINARY:
            size = self._size(self.varint())
            self.at += size
        elif kind in (LIST, SET):
            one, size = self._list_head()
            for _ in range(size):
                self._skip(BYTE if one in (TRUE, FALSE) else one, depth + 1)
        elif kind == STRUCT:
            for _ in self.fields({}, depth + 1):
                pass
        else:  # the format has no maps
            raise ValueError("an unknown type")
