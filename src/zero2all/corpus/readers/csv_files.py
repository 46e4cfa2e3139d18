"""CSV files: a header, and rows with a delimiter."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from zero2all.corpus.readers.base import BrokenRecord, ReadLimits, UnreadableFileError
from zero2all.corpus.readers.encoding import to_utf8
from zero2all.corpus.readers.streams import PeekableStream, iter_lines

DELIMITERS = "\t,;|"


def read_csv(stream: PeekableStream, limits: ReadLimits) -> Iterator[dict[str, str] | BrokenRecord]:
    """Rows under a header. A row of another length is broken, not shifted."""
    csv.field_size_limit(limits.record_bytes)
    source = _LineIterator(to_utf8(stream), limits)
    header_line = next(source, "")
    delimiter = max(DELIMITERS, key=header_line.count)
    if not header_line.count(delimiter):
        raise UnreadableFileError("table without columns")
    try:
        header = [name.strip() for name in next(csv.reader([header_line.lstrip("\ufeff")], delimiter=delimiter))]
    except csv.Error as error:
        raise UnreadableFileError("table without a header") from error
    if any(not name for name in header[1:]) or len(set(header)) < len(header):
        raise UnreadableFileError("table without a header")
    rows = csv.reader(source, delimiter=delimiter)
    while True:
        place = f"line {source.line_number + 1}"
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
            yield BrokenRecord("row that does not fit the header", place, delimiter.join(row))


class _LineIterator:
    """Lines as text for the csv module, which wants their ends kept."""

    def __init__(self, stream: PeekableStream, limits: ReadLimits) -> None:
        self._lines, self.line_number = iter_lines(stream, limits.record_bytes), 0

    def __iter__(self) -> _LineIterator:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.line_number += 1
        return "\n" if line is None else line.decode("utf-8", "replace").replace("\0", "")
