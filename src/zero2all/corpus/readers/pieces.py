"""One large file for several tasks: plain JSONL by ranges of bytes, Parquet by row groups.

Where a file is cut depends on the file alone, never on the number of workers, so the documents do not either. What is
compressed as a whole, and JSON arrays, can only be read from the front and stay in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import IO, Any

import pyarrow.parquet as pq

from zero2all.corpus.readers import json_records
from zero2all.corpus.readers.base import BROKEN, Limits, Unreadable
from zero2all.corpus.readers.encoding import guess
from zero2all.corpus.readers.kinds import kind_of
from zero2all.corpus.readers.listing import Piece, RawFile
from zero2all.corpus.readers.parquet import parquet
from zero2all.corpus.readers.streams import HEAD, Stream

PIECE_BYTES = 256_000_000
LOOK = 1 << 16  # bytes read at a time in search of the end of a line


def in_pieces(file: RawFile, size: int | None = None) -> list[RawFile]:
    """The file itself, or what it is cut into if it is large and can be cut."""
    size = size or PIECE_BYTES
    if file.bytes < 2 * size:
        return [file]
    try:
        with file.open() as raw:
            head = raw.read(HEAD)
            kind = kind_of(file.name, head)
            if kind == "jsonl" and guess(head).name in ("ascii", "utf-8", "utf-8-sig"):
                starts = [*range(0, file.bytes - size, size), file.bytes]
                ranges = pairwise(starts)
                return [replace(file, bytes=stop - at, piece=Piece("jsonl", at, stop)) for at, stop in ranges]
            if kind == "parquet":
                return _row_groups(raw, file, size)
    except (*BROKEN, Unreadable):
        pass  # whoever reads it finds out the same, and counts it
    return [file]


def _row_groups(raw: IO[bytes], file: RawFile, size: int) -> list[RawFile]:
    """Row groups together until they have ``size`` bytes as they lie in the file."""
    raw.seek(0)
    pieces: list[RawFile] = []
    start = first_row = rows = share = 0
    with pq.ParquetFile(raw) as table:
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            rows += group.num_rows
            share += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
            if share >= size or number == table.num_row_groups - 1:
                pieces.append(replace(file, bytes=share, piece=Piece("parquet", start, number + 1, first_row)))
                start, first_row, share = number + 1, rows, 0
    return pieces or [file]


def read_piece(raw: IO[bytes], piece: Piece, limits: Limits) -> Iterator[list[dict[str, Any]]]:
    """A line belongs to the piece in which it begins."""
    if piece.kind == "parquet":
        return parquet(raw, limits, piece.start, piece.stop)
    where = f"from byte {piece.start}, " if piece.start else ""
    return json_records.parsed_lines(Stream(_LinesOf(raw, piece)), limits, where)


class _LinesOf:
    """The bytes of the lines that begin in a range."""

    def __init__(self, raw: IO[bytes], piece: Piece) -> None:
        begin = _next_line(raw, piece.start) if piece.start else 3 * (raw.read(3) == b"\xef\xbb\xbf")
        raw.seek(begin)
        self._raw, self._left, self._is_inside_line = raw, piece.stop - begin, False

    def read(self, size: int, /) -> bytes:
        if self._left > 0:
            block = self._raw.read(min(size, self._left))
            self._left -= len(block)
            self._is_inside_line = not block.endswith(b"\n")
            return block
        if not self._is_inside_line:
            return b""
        line, end, _ = self._raw.read(min(size, LOOK)).partition(b"\n")
        self._is_inside_line = not end
        return line + end


def _next_line(raw: IO[bytes], at: int) -> int:
    """Where the first line begins that begins at ``at`` or later."""
    at -= 1
    raw.seek(at)
    while block := raw.read(LOOK):
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
    return at
