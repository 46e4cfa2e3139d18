"""Members of zip, tar, 7z and rar files as streams. Nothing is ever written to disk, and no member is trusted."""

from __future__ import annotations

import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Literal, cast

from zero2all.corpus.readers.base import READ_ERRORS, ReadLimits, UnreadableFileError
from zero2all.corpus.readers.listing import is_hidden
from zero2all.corpus.readers.reader_child import DATA, NEXT
from zero2all.corpus.readers.reader_process import ReaderProcess, require_libarchive
from zero2all.corpus.readers.streams import BLOCK_BYTES, LimitedReader, PeekableStream

ZIP64_RECORDS_BYTES = 76  # between the directory of a large zip file and the end record
MAX_PACKED_READ = 1 << 12  # of bzip2 in a zip file: it unpacks to 80 MB at most
MAX_PACKAGE_PARTS = 50_000  # of a document that is a zip file
MAX_ZIP_DIRECTORY_BYTES = 256 << 20  # zipfile reads it whole
MAX_TAR_READ = 1 << 20  # a long name or attribute is read in full; a real one is far below


@dataclass(frozen=True)
class ArchiveMember:
    """A member that may be read, or the reason why it may not. Without a name it stands for the rest of the archive."""

    name: str
    stream: PeekableStream | None = None
    skip_reason: str = ""


def is_unsafe_name(name: str) -> bool:
    """Whether it would leave the directory it is unpacked in. Nothing is unpacked, but such an archive is malicious."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or "\0" in name or name[1:2] == ":"


def read_zip_members(file: IO[bytes], limits: ReadLimits) -> Iterator[ArchiveMember]:
    _check_zip_entries(file, limits.members)
    with zipfile.ZipFile(file) as archive:
        total = packed = 0
        for info in archive.infolist():
            if info.filename and (info.is_dir() or is_hidden(info.filename)):
                continue
            skip_reason = _zip_skip_reason(info, limits)
            if skip_reason:
                yield ArchiveMember(info.filename, skip_reason=skip_reason)
                continue
            total, packed = total + info.file_size, packed + info.compress_size
            if problem := limits.unpacked_problem(total, packed, limits.total_bytes):  # many bombs, each small enough
                yield ArchiveMember("", skip_reason=problem)
                return
            yield from _zip_member(archive, info, limits)


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: ReadLimits) -> Iterator[ArchiveMember]:
    try:
        opened = archive.open(info)
    except (*READ_ERRORS, RuntimeError):
        yield ArchiveMember(info.filename, skip_reason="broken member")
        return
    with opened:
        yield ArchiveMember(info.filename, _limited_zip_stream(opened, info, limits.member_bytes, limits))


def _limited_zip_stream(opened: IO[bytes], info: zipfile.ZipInfo, limit: int, limits: ReadLimits) -> PeekableStream:
    """The size in the directory may lie, so what comes out is counted as well."""
    # zipfile unpacks as many packed bytes as it is asked for, whatever comes of them, unless they are deflated.
    is_bounded = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    blocks = opened if is_bounded else _BlockReader(opened, MAX_PACKED_READ)
    return PeekableStream(LimitedReader(blocks, lambda: info.compress_size, limit, limits))


def _check_zip_entries(file: IO[bytes], limit: int) -> None:
    """Count the members in the directory, before Python's zipfile makes an object of each.

    Their number is written in the archive too, but it may lie, and zipfile does not go by it.
    """
    end = cast(Any, zipfile)._EndRecData(file)  # what zipfile itself will find; there is no public way
    if not end:
        raise UnreadableFileError("broken archive")
    left, is_large, place = int(end[5]), end[0] == b"PK\x06\x06", int(end[9])
    if left > MAX_ZIP_DIRECTORY_BYTES:
        raise UnreadableFileError(f"archive with a directory larger than {MAX_ZIP_DIRECTORY_BYTES >> 20} MiB")
    file.seek(max(place - left - ZIP64_RECORDS_BYTES * is_large, 0))
    count, tail = 0, b""
    while left > 0 and count <= limit and (block := file.read(min(left, BLOCK_BYTES))):
        data = tail + block
        count, tail, left = count + data.count(b"PK\x01\x02"), data[-3:], left - len(block)
    if count > limit:
        raise UnreadableFileError(f"archive of more than {limit} members")
    file.seek(0)


def _zip_skip_reason(info: zipfile.ZipInfo, limits: ReadLimits) -> str:
    is_regular = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
    problem = limits.unpacked_problem(info.file_size, info.compress_size, limits.member_bytes)
    return _skip_reason(info.filename, is_regular=is_regular, problem="encrypted" if info.flag_bits & 0x1 else problem)


def _skip_reason(name: str, *, is_regular: bool, problem: str) -> str:
    """Why a member may not be read: for its name or type, or else for ``problem``."""
    if is_unsafe_name(name):
        return "path that leaves the archive"
    return problem if is_regular else "link or device"


class ZipPackage:
    """A document that is a zip file of parts: DOCX, EPUB. A part is read whole."""

    def __init__(self, file: IO[bytes], limits: ReadLimits) -> None:
        _check_zip_entries(file, MAX_PACKAGE_PARTS)
        self._archive, self._limits, self._left = zipfile.ZipFile(file), limits, limits.package_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._archive.NameToInfo

    def read(self, name: str) -> bytes:
        if name not in self:
            raise UnreadableFileError("part missing")
        info = self._archive.getinfo(name)
        if skip_reason := _zip_skip_reason(info, self._limits):
            raise UnreadableFileError(skip_reason)
        try:
            opened = self._archive.open(info)
        except RuntimeError as error:
            raise UnreadableFileError("broken part") from error
        with opened:
            stream = _limited_zip_stream(opened, info, self._limits.record_bytes, self._limits)
            data = stream.read_all(min(self._limits.record_bytes, self._left), "part")
        self._left -= len(data)
        return data


def read_tar_members(stream: PeekableStream, limits: ReadLimits) -> Iterator[ArchiveMember]:
    """In stream order; the stream itself limits decompression bombs."""
    with tarfile.open(fileobj=cast("IO[bytes]", _ForwardOnlyFile(stream)), mode="r:") as archive:
        count = total = 0
        while (info := archive.next()) is not None:
            cast(Any, archive).members.clear()  # tarfile remembers every member it has seen
            if info.isdir() or is_hidden(info.name):
                continue
            count, total = count + 1, total + info.size
            if count > limits.members or total > limits.total_bytes:
                too_many = f"more than {limits.members} members" if count > limits.members else ""
                yield ArchiveMember("", skip_reason=too_many or limits.size_problem(total, limits.total_bytes))
                return
            # A sparse file is mostly holes that cost nothing to claim.
            is_regular = info.isreg() and not info.issparse()
            skip_reason = _skip_reason(
                info.name, is_regular=is_regular, problem=limits.size_problem(info.size, limits.member_bytes)
            )
            opened = None if skip_reason else archive.extractfile(info)
            yield ArchiveMember(
                info.name, PeekableStream(_BlockReader(opened, MAX_TAR_READ)) if opened else None, skip_reason
            )


def read_libarchive_members(file: IO[bytes], kind: Literal["7z", "rar"], limits: ReadLimits) -> Iterator[ArchiveMember]:
    """In the order of the archive. Members of a solid archive are unpacked in a row, also those that nobody reads, so
    what they unpack to is limited for all together."""
    require_libarchive()
    packed_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    is_rar5 = file.read(8).endswith(b"\x01\x00")
    with ReaderProcess("rar5" if kind == "rar" and is_rar5 else kind, file, limits) as process:
        unpacked = LimitedReader(_MemberData(process), lambda: packed_bytes, limits.total_bytes, limits)
        count = total = 0
        while (header := process.ask(NEXT)) is not None:
            member = json.loads(header)
            name, size = str(member["name"]), int(member["size"])
            count, total = count + 1, total + max(size, 0)
            too_many = f"more than {limits.members} members" if count > limits.members else ""
            too_large = limits.unpacked_problem(max(total, unpacked.bytes), packed_bytes, limits.total_bytes)
            if too_many or too_large:
                yield ArchiveMember("", skip_reason=too_many or too_large)
                return
            if member["directory"] or is_hidden(name):
                continue
            problem = limits.size_problem(size, limits.member_bytes) or ("encrypted" if member["encrypted"] else "")
            skip_reason = _skip_reason(name, is_regular=member["regular"], problem=problem)
            unpacked.raw = _MemberData(process)
            yield ArchiveMember(name, None if skip_reason else PeekableStream(unpacked), skip_reason)


class _MemberData:
    """The bytes of the member that a reader process is at."""

    def __init__(self, process: ReaderProcess) -> None:
        self._process, self._block = process, b""

    def read(self, size: int, /) -> bytes:
        self._block = self._block or self._process.ask(DATA) or b""
        block, self._block = self._block[:size], self._block[size:]
        return block


class _BlockReader:
    """A member, never more of it at once than ``largest``: tarfile passes on any size that it is asked for."""

    def __init__(self, member: IO[bytes], largest: int) -> None:
        self._member, self._largest = member, largest

    def read(self, size: int, /) -> bytes:
        return self._member.read(min(size, self._largest))


class _ForwardOnlyFile:
    """A stream that tarfile believes it can seek in; it only ever does so forward."""

    def __init__(self, stream: PeekableStream) -> None:
        self._stream, self._position = stream, 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > MAX_TAR_READ:
            raise UnreadableFileError("archive with a header too large")
        blocks = []
        while size:
            block = self._stream.read(size)
            if not block:
                break
            blocks.append(block)
            size -= len(block)
            self._position += len(block)
        return b"".join(blocks)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or offset < self._position:
            raise UnreadableFileError("archive that is not in order")
        while self._position < offset and self.read(min(offset - self._position, MAX_TAR_READ)):
            pass
        return self._position

    def seekable(self) -> bool:
        return True
