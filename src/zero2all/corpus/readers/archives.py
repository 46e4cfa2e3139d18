"""Members of zip and tar files as streams. Nothing is ever written to disk, and no member is trusted."""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, cast

from zero2all.corpus.readers.base import READ_ERRORS, ReadLimits, UnreadableFileError
from zero2all.corpus.readers.listing import is_hidden
from zero2all.corpus.readers.streams import LimitedReader, PeekableStream

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
    entries = _zip_entries(file)
    if entries > limits.members:
        raise UnreadableFileError(f"archive of more than {limits.members} members")
    with zipfile.ZipFile(file) as archive:
        total = 0
        for info in archive.infolist():
            if info.is_dir() or is_hidden(info.filename):
                continue
            skip_reason = _zip_skip_reason(info, limits)
            total += info.file_size
            if skip_reason:
                yield ArchiveMember(info.filename, skip_reason=skip_reason)
            elif total > limits.total_bytes:
                yield ArchiveMember("", skip_reason=f"unpacks to more than {limits.total_bytes >> 20} MiB")
                return
            else:
                yield from _zip_member(archive, info, limits)


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: ReadLimits) -> Iterator[ArchiveMember]:
    try:
        opened = archive.open(info)
    except (*READ_ERRORS, RuntimeError):
        yield ArchiveMember(info.filename, skip_reason="broken member")
        return
    with opened:  # the size in the directory may lie, so what comes out is counted as well
        guarded = LimitedReader(opened, lambda: info.compress_size, limits.member_bytes, limits)
        yield ArchiveMember(info.filename, PeekableStream(guarded))


def _zip_skip_reason(info: zipfile.ZipInfo, limits: ReadLimits) -> str:
    mode = info.external_attr >> 16
    if is_unsafe_name(info.filename):
        return "path that leaves the archive"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "link or device"
    if info.flag_bits & 0x1:
        return "encrypted"
    if info.file_size > limits.member_bytes:
        return f"unpacks to more than {limits.member_bytes >> 20} MiB"
    if info.file_size > limits.ratio_check_bytes and info.file_size > limits.max_compression_ratio * max(
        info.compress_size, 1
    ):
        return f"unpacks to more than {limits.max_compression_ratio} times its size"
    return ""


def _zip_entries(file: IO[bytes]) -> int:
    """How many members the directory names, before Python's zipfile makes an object of each."""
    file.seek(0, 2)
    size = file.tell()
    file.seek(max(size - (1 << 16) - 200, 0))
    tail = file.read()
    file.seek(0)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + 12:
        raise UnreadableFileError("broken archive")
    large = tail.rfind(b"PK\x06\x06")
    if large >= 0 and len(tail) >= large + 40:
        return int(struct.unpack_from("<Q", tail, large + 32)[0])
    return int(struct.unpack_from("<H", tail, end + 10)[0])


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
                large = f"unpacks to more than {limits.total_bytes >> 20} MiB"
                yield ArchiveMember(
                    "", skip_reason=large if count <= limits.members else f"more than {limits.members} members"
                )
                return
            skip_reason = _tar_skip_reason(info, limits)
            opened = None if skip_reason else archive.extractfile(info)
            yield ArchiveMember(info.name, PeekableStream(_BlockReader(opened)) if opened else None, skip_reason)


def _tar_skip_reason(info: tarfile.TarInfo, limits: ReadLimits) -> str:
    if is_unsafe_name(info.name):
        return "path that leaves the archive"
    if not info.isreg() or info.issparse():  # a sparse file is mostly holes that cost nothing to claim
        return "link or device"
    if info.size > limits.member_bytes:
        return f"unpacks to more than {limits.member_bytes >> 20} MiB"
    return ""


class _BlockReader:
    """A member, never more of it at once than the largest header: tarfile passes on any size that it is asked for."""

    def __init__(self, member: IO[bytes]) -> None:
        self._member = member

    def read(self, size: int, /) -> bytes:
        return self._member.read(min(size, MAX_TAR_READ))


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
