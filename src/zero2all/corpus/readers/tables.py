"""Tables as text: a header, and rows with a separator."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from zero2all.corpus.readers.base import BrokenRecord, Limits, Unreadable
from zero2all.corpus.readers.encoding import as_utf8
from zero2all.corpus.readers.streams import Stream, lines

SEPARATORS = "\t,;|"


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
