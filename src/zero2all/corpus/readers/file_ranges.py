"""One large file for several tasks: plain JSONL by ranges of bytes, Parquet by row groups.

Where a file is split depends on the file alone, never on the number of workers, so the documents do not either.
Compressed files and JSON arrays can only be read from the front and are not split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import IO

import pyarrow.parquet as pq

from zero2all.corpus.readers import json_records
from zero2all.corpus.readers.base import READ_ERRORS, ReadLimits, RecordChunk, UnreadableFileError
from zero2all.corpus.readers.encoding import detect_encoding
from zero2all.corpus.readers.formats import guess_format
from zero2all.corpus.readers.listing import FileRange, RawFile
from zero2all.corpus.readers.parquet import read_parquet
from zero2all.corpus.readers.parquet_footer import read_row_groups
from zero2all.corpus.readers.streams import HEAD_BYTES, PeekableStream

FILE_RANGE_BYTES = 256_000_000
LINE_SCAN_BYTES = 1 << 16  # bytes read at a time in search of the end of a line


def split_large_file(file: RawFile, size: int | None = None) -> list[RawFile]:
    """The file itself, or its ranges if it is large and can be split."""
    size = size or FILE_RANGE_BYTES
    if file.bytes < 2 * size:
        return [file]
    try:
        with file.open() as raw:
            head = raw.read(HEAD_BYTES)
            file_format = guess_format(file.name, head)
            if file_format == "jsonl" and detect_encoding(head).name in ("ascii", "utf-8", "utf-8-sig"):
                starts = [*range(0, file.bytes - size, size), file.bytes]
                ranges = pairwise(starts)
                return [replace(file, bytes=stop - at, file_range=FileRange("jsonl", at, stop)) for at, stop in ranges]
            if file_format == "parquet":
                return _split_row_groups(raw, file, size)
    except (*READ_ERRORS, UnreadableFileError):
        pass  # the reader fails the same way, and counts it
    return [file]


def _split_row_groups(raw: IO[bytes], file: RawFile, size: int) -> list[RawFile]:
    """Consecutive row groups of about ``size`` compressed bytes."""
    raw.seek(0)
    ranges: list[RawFile] = []
    start = first_row = rows = share = 0
    with pq.ParquetFile(raw) as table:
        groups = read_row_groups(raw, table.metadata.num_columns)
        for number, group in enumerate(groups):
            rows += group.num_rows
            share += sum(column.total_compressed_size for column in group.columns)
            if share >= size or number == len(groups) - 1:
                ranges.append(replace(file, bytes=share, file_range=FileRange("parquet", start, number + 1, first_row)))
                start, first_row, share = number + 1, rows, 0
    return ranges or [file]


def read_file_range(raw: IO[bytes], file_range: FileRange, limits: ReadLimits) -> Iterator[RecordChunk]:
    """A line belongs to the range in which it begins."""
    if file_range.file_format == "parquet":
        return read_parquet(raw, limits, file_range.start, file_range.stop)
    location_prefix = f"from byte {file_range.start}, " if file_range.start else ""
    return json_records.parse_jsonl(PeekableStream(_LineAlignedReader(raw, file_range)), limits, location_prefix)


class _LineAlignedReader:
    """The bytes of the lines that begin in a range."""

    def __init__(self, raw: IO[bytes], file_range: FileRange) -> None:
        begin = _next_line_start(raw, file_range.start) if file_range.start else 3 * (raw.read(3) == b"\xef\xbb\xbf")
        raw.seek(begin)
        self._raw, self._left, self._is_inside_line = raw, file_range.stop - begin, False

    def read(self, size: int, /) -> bytes:
        if self._left > 0:
            block = self._raw.read(min(size, self._left))
            self._left -= len(block)
            self._is_inside_line = not block.endswith(b"\n")
            return block
        if not self._is_inside_line:
            return b""
        line, end, _ = self._raw.read(min(size, LINE_SCAN_BYTES)).partition(b"\n")
        self._is_inside_line = not end
        return line + end


def _next_line_start(raw: IO[bytes], offset: int) -> int:
    """Where the first line begins that begins at ``offset`` or later."""
    offset -= 1
    raw.seek(offset)
    while block := raw.read(LINE_SCAN_BYTES):
        found = block.find(b"\n")
        if found >= 0:
            return offset + found + 1
        offset += len(block)
    return offset
