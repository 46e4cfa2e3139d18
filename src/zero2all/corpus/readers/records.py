"""The one way in: what a file is, what it is wrapped in, and the records inside."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any

import pyarrow as pa

from zero2all.corpus.readers import archives, json_records, pages, tables, texts
from zero2all.corpus.readers.base import NOT_INSTALLED, BrokenRecord, LeftOutMember, Limits, Unreadable, WholeFile
from zero2all.corpus.readers.encoding import mend_mojibake
from zero2all.corpus.readers.kinds import CODE, Kind, inner_name, kind_of
from zero2all.corpus.readers.listing import RawFile
from zero2all.corpus.readers.streams import HEAD, Stream, compression_of, unpacked

BROKEN = (*archives.BROKEN, lzma.LZMAError, pa.ArrowException)
PATH_FIELDS = ("path", "file", "filename", "file_path", "max_stars_repo_path")


def read_records(file: RawFile, limits: Limits | None = None) -> Iterator[dict[str, Any]]:
    """Records of a file in their order, and stand-ins for the broken ones.

    Raises Unreadable, also after some records, when the file as a whole cannot be read (on).
    """
    limits = limits or Limits()
    try:
        with file.open() as raw:
            yield from _records(raw, file.name, limits)
    except BROKEN as error:
        raise Unreadable(f"broken file ({type(error).__name__})") from error


def _records(raw: IO[bytes], name: str, limits: Limits) -> Iterator[dict[str, Any]]:
    stream, compression, kind = look(Stream(raw), name, limits)
    if kind == "zip" and not compression:
        yield from _members(archives.zip_members(raw, limits), name, limits)
    elif kind == "tar":
        yield from _members(archives.tar_members(stream, limits), name, limits)
    elif kind == "parquet" and not compression:
        raw.seek(0)
        yield from _mended(tables.parquet(raw), is_code=False)
    elif kind == "zip":
        raise Unreadable("zip inside another compression")
    else:
        yield from _mended(_of_kind(stream, kind, name, limits), is_code=kind == "code")


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


def _of_kind(stream: Stream, kind: Kind, name: str, limits: Limits) -> Iterator[dict[str, Any]]:
    match kind:
        case "jsonl":
            return json_records.json_lines(stream, limits)
        case "json array":
            return json_records.json_array(stream, limits)
        case "json object":
            return json_records.json_object(stream, limits)
        case "csv":
            return tables.table_text(stream, limits)
        case "parquet":
            data = stream.read_whole(limits.parquet_in_memory, "Parquet inside something else")
            return tables.parquet(pa.BufferReader(data))
        case "wikiextractor":
            return texts.wikiextractor(stream, limits)
        case "html":
            return pages.html_file(stream, name, limits)
        case "warc":
            return pages.warc(stream, limits)
        case "zip" | "tar":
            raise Unreadable("archive inside an archive")
        case _:
            return texts.whole_text(stream, name, limits)


def _members(members: Iterator[archives.Member], archive: str, limits: Limits) -> Iterator[dict[str, Any]]:
    """Every member by the same rules as a file. What goes wrong in one does not touch the next."""
    begun = False
    while True:
        try:
            member = next(members, None)
        except Unreadable as reason:
            if not begun:
                raise
            yield LeftOutMember(str(reason), archive)
            return
        if member is None:
            return
        begun = True
        name = f"{archive}!{member.name}" if member.name else archive
        if member.stream is None:
            yield LeftOutMember(member.refused, name)
            continue
        try:
            stream, _, kind = look(member.stream, member.name, limits)
            records = _of_kind(stream, kind, name, limits)
            for record in _mended(records, is_code=kind == "code"):
                if isinstance(record, BrokenRecord):
                    record["place"] = f"{name} {record.place}".rstrip()
                yield record
        except Unreadable as reason:
            yield LeftOutMember(str(reason), name)
        except BROKEN as error:
            yield LeftOutMember(f"broken file ({type(error).__name__})", name)


def _mended(records: Iterator[dict[str, Any]], is_code: bool) -> Iterator[dict[str, Any]]:
    """With its mojibake read rightly, except in code, where odd strings may be meant."""
    for record in records:
        if is_code or isinstance(record, BrokenRecord) or _is_code(record):
            yield record
            continue
        try:
            for key, value in record.items():
                if isinstance(value, str) and not value.isascii():
                    record[key] = mend_mojibake(value)
        except Unreadable:  # only now, and only for text that looks bad, is ftfy needed
            yield BrokenRecord(NOT_INSTALLED)
        else:
            yield record


def _is_code(record: dict[str, Any]) -> bool:
    if isinstance(record, WholeFile):
        return False
    paths = [record[name] for name in PATH_FIELDS if isinstance(record.get(name), str)]
    return "code" in record or any(PurePosixPath(path).suffix.lower() in CODE for path in paths)
