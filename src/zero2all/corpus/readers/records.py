"""Entry point of the readers: detect format and compression, and read the records.

One large file is split for several tasks: plain JSONL by ranges of bytes, Parquet by row groups. Where depends on the
file alone, never on the number of workers, so the documents do not either. Compressed files and JSON arrays can only be
read from the front and are not split.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import IO, Any

import pyarrow.parquet as pq

from zero2all.base.plugins import PluginSpec, bind, find_plugin, split_spec
from zero2all.corpus.document import PATH_FIELDS, is_code_path
from zero2all.corpus.readers import archives, json_records
from zero2all.corpus.readers.base import (
    NOT_INSTALLED,
    READ_ERRORS,
    TOO_DEEP,
    BrokenRecord,
    ReadLimits,
    RecordChunk,
    SkippedMember,
    TextRecord,
    UnreadableFileError,
    is_too_deep,
)
from zero2all.corpus.readers.encoding import detect_encoding, fix_mojibake
from zero2all.corpus.readers.formats import (
    ARCHIVES,
    FileFormat,
    guess_format,
    seekable_formats,
    strip_compression_extension,
)
from zero2all.corpus.readers.listing import FileRange, RawFile, is_excluded
from zero2all.corpus.readers.parquet import read_parquet
from zero2all.corpus.readers.parquet_footer import read_row_groups
from zero2all.corpus.readers.streams import HEAD_BYTES, PeekableStream, decompress_stream, detect_compression

CHANGED_WHILE_READ = "changed while it was read"
CHUNK_RECORDS, CHUNK_CHARACTERS = 1000, 1 << 20

_PATH_FIELDS = frozenset(PATH_FIELDS)


def read_records(file: RawFile, limits: ReadLimits | None = None) -> Iterator[dict[str, Any] | BrokenRecord]:
    """Records of a file in their order, and stand-ins for the broken ones.

    Raises UnreadableFileError, also after some records, when the file cannot be read (further).
    """
    return chain.from_iterable(read_record_chunks(file, limits))


def read_record_chunks(
    file: RawFile, limits: ReadLimits | None = None, exclude: Sequence[str] = (), reader: PluginSpec | None = None
) -> Iterator[RecordChunk]:
    """The same, in chunks. Archive members that match one of ``exclude`` are skipped. A ``reader`` reads the file
    whatever it looks like; otherwise its format is detected."""
    limits = limits or ReadLimits()
    try:
        with file.open() as raw:
            try:
                if file.file_range:
                    yield from map(_sanitize_records, read_file_range(raw, file.file_range, limits))
                elif reader is not None:
                    yield from _read_format(_decompress(raw, limits), reader, file.name, limits)
                else:
                    yield from _read_chunks(raw, file.name, limits, exclude)
            except (*READ_ERRORS, UnreadableFileError) as error:
                if file.has_changed(raw):  # which explains the other reason
                    raise UnreadableFileError(CHANGED_WHILE_READ) from error
                raise
            if file.has_changed(raw):
                raise UnreadableFileError(CHANGED_WHILE_READ)
    except FileNotFoundError as error:
        raise UnreadableFileError("file not found") from error
    except READ_ERRORS as error:
        raise UnreadableFileError(f"broken file ({type(error).__name__})") from error


def _read_chunks(raw: IO[bytes], name: str, limits: ReadLimits, exclude: Sequence[str]) -> Iterator[RecordChunk]:
    stream, compression, file_format = detect_format(PeekableStream(raw), name, limits)
    if file_format == "tar":
        yield from _read_members(archives.read_tar_members(stream, limits), name, limits, exclude)
    elif compression and file_format in ("zip", "7z", "rar"):
        raise UnreadableFileError(f"{file_format} inside another compression")
    elif file_format == "zip":
        yield from _read_members(archives.read_zip_members(raw, limits), name, limits, exclude)
    elif file_format in ("7z", "rar"):
        members = archives.read_libarchive_members(raw, "7z" if file_format == "7z" else "rar", limits)
        yield from _read_members(members, name, limits, exclude)
    elif file_format in seekable_formats() and not compression:
        raw.seek(0)
        yield from _read(raw, file_format, name, limits)
    else:
        yield from _read_format(stream, file_format, name, limits)


def _decompress(raw: IO[bytes], limits: ReadLimits) -> PeekableStream:
    stream = PeekableStream(raw)
    compression = detect_compression(stream.peek(HEAD_BYTES))
    return decompress_stream(stream, compression, limits) if compression else stream


def detect_format(
    stream: PeekableStream, name: str, limits: ReadLimits
) -> tuple[PeekableStream, str | None, FileFormat]:
    """The stream without its compression, that compression, and what is inside."""
    inner, promised = strip_compression_extension(name)
    head = stream.peek(HEAD_BYTES)
    compression = detect_compression(head)
    if compression:
        stream = decompress_stream(stream, compression, limits)
        return stream, compression, guess_format(inner, stream.peek(HEAD_BYTES))
    if not promised:
        return stream, None, guess_format(name, head)
    # A web server may have unpacked it on the way. Then it must look like what the name promises inside.
    file_format = guess_format(inner, head)
    if file_format == "jsonl" and not head.lstrip().startswith(b"{"):
        raise UnreadableFileError(f"not {promised}, though named so")
    return stream, None, file_format


def _read_format(stream: PeekableStream, reader: PluginSpec, name: str, limits: ReadLimits) -> Iterator[RecordChunk]:
    """The records of a stream that may not be seekable."""
    format_name, _ = split_spec(reader)
    if format_name in ARCHIVES.values():
        raise UnreadableFileError("archive inside an archive")
    if find_plugin("reader", format_name).details.get("seekable"):
        data = stream.read_all(limits.seekable_in_memory, f"{format_name} inside something else")
        return _read(io.BytesIO(data), reader, name, limits)
    return _read(stream, reader, name, limits)


def _read(
    source: PeekableStream | IO[bytes], reader: PluginSpec, name: str, limits: ReadLimits
) -> Iterator[RecordChunk]:
    bound = bind("reader", reader)
    details = find_plugin("reader", bound.name).details
    records = bound.iterate(source, name, limits)
    chunks = records if details.get("chunked") else _chunk_records(records)
    return chunks if details.get("raw") else map(_sanitize_records, chunks)


def _chunk_records(records: Iterator[dict[str, Any] | BrokenRecord]) -> Iterator[RecordChunk]:
    """Records that come one by one, in chunks of bounded size. Records before a read error are not lost."""
    chunk: RecordChunk = []
    size = 0
    try:
        for record in records:
            chunk.append(record)
            values = (record.reason, record.place, record.raw) if isinstance(record, BrokenRecord) else record.values()
            size += sum(len(value) for value in values if isinstance(value, str))
            if size >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_RECORDS:
                yield chunk
                chunk, size = [], 0
    except (UnreadableFileError, *READ_ERRORS):
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def _read_members(
    members: Iterator[archives.ArchiveMember], archive: str, limits: ReadLimits, exclude: Sequence[str]
) -> Iterator[RecordChunk]:
    """Every member by the same rules as a file. An error in one does not affect the next."""
    begun = False
    while True:
        try:
            member = next(members, None)
        except UnreadableFileError as reason:
            if not begun:
                raise
            yield [SkippedMember(str(reason), archive)]
            return
        if member is None:
            return
        begun = True
        if is_excluded(member.name, exclude):
            continue
        name = f"{archive}!{member.name}" if member.name else archive
        if member.stream is None:
            yield [SkippedMember(member.skip_reason, name)]
            continue
        try:
            stream, _, file_format = detect_format(member.stream, member.name, limits)
            for chunk in _read_format(stream, file_format, name, limits):
                for record in chunk:
                    if isinstance(record, BrokenRecord):
                        record.place = f"{name} {record.place}".rstrip()
                yield chunk
        except UnreadableFileError as reason:
            yield [SkippedMember(str(reason), name)]
        except READ_ERRORS as error:
            yield [SkippedMember(f"broken file ({type(error).__name__})", name)]


def _sanitize_records(records: RecordChunk) -> RecordChunk:
    """What every later step can take: nothing nested so deep that it would end in a RecursionError, no mojibake."""
    return _fix_record_encoding(
        [
            BrokenRecord(TOO_DEEP) if not isinstance(record, BrokenRecord) and is_too_deep(record) else record
            for record in records
        ]
    )


def _fix_record_encoding(records: RecordChunk) -> RecordChunk:
    """Fix mojibake, except in code, where unusual strings may be intended."""
    for number, record in enumerate(records):
        if isinstance(record, BrokenRecord) or _is_code_record(record):
            continue
        for key, value in record.items():
            if isinstance(value, str) and not value.isascii():
                text = fix_mojibake(value)
                if text is None:  # only for text that looks bad is ftfy needed
                    records[number] = BrokenRecord(NOT_INSTALLED)
                    break
                record[key] = text
    return records


def _is_code_record(record: dict[str, Any]) -> bool:
    if isinstance(record, TextRecord):
        return False
    if "code" in record or _PATH_FIELDS.isdisjoint(record):
        return "code" in record
    return any(isinstance(record.get(name), str) and is_code_path(record[name]) for name in PATH_FIELDS)


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
