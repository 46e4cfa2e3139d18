"""The one way in: what a file is, what it is wrapped in, and the records inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import chain
from typing import IO, Any

import pyarrow as pa

from zero2all.corpus.code import PATH_FIELDS, is_code_path
from zero2all.corpus.readers import archives, json_records, pages, tables, texts
from zero2all.corpus.readers.base import (
    BROKEN,
    NOT_INSTALLED,
    TOO_DEEP,
    BrokenRecord,
    LeftOutMember,
    Limits,
    Unreadable,
    WholeFile,
    is_too_deep,
)
from zero2all.corpus.readers.encoding import mend_mojibake
from zero2all.corpus.readers.kinds import Kind, inner_name, kind_of
from zero2all.corpus.readers.listing import RawFile
from zero2all.corpus.readers.parquet import parquet
from zero2all.corpus.readers.pieces import read_piece
from zero2all.corpus.readers.streams import HEAD, Stream, compression_of, unpacked

CHANGED = "changed while it was read"
BATCH_RECORDS, BATCH_CHARACTERS = 1000, 1 << 20

_PATH_FIELDS = frozenset(PATH_FIELDS)

Records = list[dict[str, Any]]


def read_records(file: RawFile, limits: Limits | None = None) -> Iterator[dict[str, Any]]:
    """Records of a file in their order, and stand-ins for the broken ones.

    Raises Unreadable, also after some records, when the file as a whole cannot be read (on).
    """
    return chain.from_iterable(read_batches(file, limits))


def read_batches(file: RawFile, limits: Limits | None = None, exclude: Sequence[str] = ()) -> Iterator[Records]:
    """The same, some at a time. Members of archives that match one of ``exclude`` are passed over."""
    limits = limits or Limits()
    try:
        with file.open() as raw:
            try:
                if file.piece:
                    yield from map(_sound, read_piece(raw, file.piece, limits))
                else:
                    yield from _batches(raw, file.name, limits, exclude)
            except (*BROKEN, Unreadable) as error:
                if file.has_changed(raw):  # which explains the other reason
                    raise Unreadable(CHANGED) from error
                raise
            if file.has_changed(raw):
                raise Unreadable(CHANGED)
    except FileNotFoundError as error:
        raise Unreadable("file not found") from error
    except BROKEN as error:
        raise Unreadable(f"broken file ({type(error).__name__})") from error


def _batches(raw: IO[bytes], name: str, limits: Limits, exclude: Sequence[str]) -> Iterator[Records]:
    stream, compression, kind = look(Stream(raw), name, limits)
    if kind == "zip" and not compression:
        yield from _members(archives.zip_members(raw, limits), name, limits, exclude)
    elif kind == "tar":
        yield from _members(archives.tar_members(stream, limits), name, limits, exclude)
    elif kind == "parquet" and not compression:
        raw.seek(0)
        yield from map(_sound, parquet(raw, limits))
    elif kind == "zip":
        raise Unreadable("zip inside another compression")
    else:
        yield from _of_kind(stream, kind, name, limits)


def look(stream: Stream, name: str, limits: Limits) -> tuple[Stream, str | None, Kind]:
    """The stream without its compression, that compression, and what is inside."""
    inner, promised = inner_name(name)
    head = stream.peek(HEAD)
    compression = compression_of(head)
    if compression:
        stream = unpacked(stream, compression, limits)
        return stream, compression, kind_of(inner, stream.peek(HEAD))
    if not promised:
        return stream, None, kind_of(name, head)
    # A web server may have unpacked it on the way. Then it must look like what the name promises inside.
    kind = kind_of(inner, head)
    if kind == "jsonl" and not head.lstrip().startswith(b"{"):
        raise Unreadable(f"not {promised}, though named so")
    return stream, None, kind


def _of_kind(stream: Stream, kind: Kind, name: str, limits: Limits) -> Iterator[Records]:
    match kind:
        case "jsonl":
            batches = json_records.json_lines(stream, limits)
        case "json array":
            batches = _grouped(json_records.json_array(stream, limits))
        case "json object":
            batches = _grouped(json_records.json_object(stream, limits))
        case "csv":
            batches = _grouped(tables.table_text(stream, limits))
        case "parquet":
            data = stream.read_whole(limits.parquet_in_memory, "Parquet inside something else")
            batches = parquet(pa.BufferReader(data), limits)
        case "wikiextractor":
            batches = _grouped(texts.wikiextractor(stream, limits))
        case "html":
            batches = _grouped(pages.html_file(stream, name, limits))
        case "warc":
            batches = _grouped(pages.warc(stream, limits))
        case "zip" | "tar":
            raise Unreadable("archive inside an archive")
        case _:
            batches = _grouped(texts.whole_text(stream, name, limits))
    return batches if kind == "code" else map(_sound, batches)


def _grouped(records: Iterator[dict[str, Any]]) -> Iterator[Records]:
    """Records that come one by one, in batches of bounded size. What came before a file breaks off is not lost."""
    batch: Records = []
    size = 0
    try:
        for record in records:
            batch.append(record)
            size += sum(len(value) for value in record.values() if isinstance(value, str))
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
                yield batch
                batch, size = [], 0
    except (Unreadable, *BROKEN):
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _members(
    members: Iterator[archives.Member], archive: str, limits: Limits, exclude: Sequence[str]
) -> Iterator[Records]:
    """Every member by the same rules as a file. What goes wrong in one does not touch the next."""
    begun = False
    while True:
        try:
            member = next(members, None)
        except Unreadable as reason:
            if not begun:
                raise
            yield [LeftOutMember(str(reason), archive)]
            return
        if member is None:
            return
        begun = True
        if any(fnmatch(member.name, pattern) for pattern in exclude):
            continue
        name = f"{archive}!{member.name}" if member.name else archive
        if member.stream is None:
            yield [LeftOutMember(member.refused, name)]
            continue
        try:
            stream, _, kind = look(member.stream, member.name, limits)
            for batch in _of_kind(stream, kind, name, limits):
                for record in batch:
                    if isinstance(record, BrokenRecord):
                        record["place"] = f"{name} {record.place}".rstrip()
                yield batch
        except Unreadable as reason:
            yield [LeftOutMember(str(reason), name)]
        except BROKEN as error:
            yield [LeftOutMember(f"broken file ({type(error).__name__})", name)]


def _sound(batch: Records) -> Records:
    """What every later step can take: nothing nested so deep that it would end in a RecursionError, no mojibake."""
    return _mended([BrokenRecord(TOO_DEEP) if is_too_deep(record) else record for record in batch])


def _mended(batch: Records) -> Records:
    """With its mojibake read rightly, except in code, where odd strings may be meant."""
    places = [
        (number, key, value)
        for number, record in enumerate(batch)
        if not isinstance(record, BrokenRecord) and not _is_code(record)
        for key, value in record.items()
        if isinstance(value, str) and not value.isascii()
    ]
    better = mend_mojibake([value for _, _, value in places]) if places else {}
    for place, text in better.items():
        number, key, _ = places[place]
        if text is not None:
            batch[number][key] = text
        else:  # only for text that looks bad is ftfy needed
            batch[number] = BrokenRecord(NOT_INSTALLED)
    return batch


def _is_code(record: dict[str, Any]) -> bool:
    if isinstance(record, WholeFile):
        return False
    if "code" in record or _PATH_FIELDS.isdisjoint(record):
        return "code" in record
    return any(isinstance(record.get(name), str) and is_code_path(record[name]) for name in PATH_FIELDS)
