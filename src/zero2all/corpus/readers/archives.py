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

from zero2all.corpus.readers.base import BROKEN, Limits, Unreadable
from zero2all.corpus.readers.listing import is_hidden
from zero2all.corpus.readers.streams import Guarded, Stream

TAR_HEADER = 1 << 20  # a long name or attribute is read whole; an honest one is far below


@dataclass(frozen=True)
class Member:
    """A member that may be read, or the reason why it may not. Without a name it speaks for the rest of the archive."""

    name: str
    stream: Stream | None = None
    refused: str = ""


def unsafe_name(name: str) -> bool:
    """Whether it would leave the directory it is unpacked in. Nothing is unpacked, but such an archive means harm."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or "\0" in name or name[1:2] == ":"


def zip_members(file: IO[bytes], limits: Limits) -> Iterator[Member]:
    entries = _zip_entries(file)
    if entries > limits.members:
        raise Unreadable(f"archive of more than {limits.members} members")
    with zipfile.ZipFile(file) as archive:
        total = 0
        for info in archive.infolist():
            if info.is_dir() or is_hidden(info.filename):
                continue
            refused = _why_not_zip(info, limits)
            total += info.file_size
            if refused:
                yield Member(info.filename, refused=refused)
            elif total > limits.total_bytes:
                yield Member("", refused=f"unpacks to more than {limits.total_bytes >> 20} MiB")
                return
            else:
                yield from _zip_member(archive, info, limits)


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: Limits) -> Iterator[Member]:
    try:
        opened = archive.open(info)
    except (*BROKEN, RuntimeError):
        yield Member(info.filename, refused="broken member")
        return
    with opened:  # the size in the directory may lie, so what comes out is counted as well
        guarded = Guarded(opened, lambda: info.compress_size, limits.member_bytes, limits)
        yield Member(info.filename, Stream(guarded))


def _why_not_zip(info: zipfile.ZipInfo, limits: Limits) -> str:
    mode = info.external_attr >> 16
    if unsafe_name(info.filename):
        return "path that leaves the archive"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "link or device"
    if info.flag_bits & 0x1:
        return "encrypted"
    if info.file_size > limits.member_bytes:
        return f"unpacks to more than {limits.member_bytes >> 20} MiB"
    if info.file_size > limits.ratio_after and info.file_size > limits.ratio * max(info.compress_size, 1):
        return f"unpacks to more than {limits.ratio} times its size"
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
        raise Unreadable("broken archive")
    large = tail.rfind(b"PK\x06\x06")
    if large >= 0 and len(tail) >= large + 40:
        return int(struct.unpack_from("<Q", tail, large + 32)[0])
    return int(struct.unpack_from("<H", tail, end + 10)[0])


def tar_members(stream: Stream, limits: Limits) -> Iterator[Member]:
    """One after the other, as the stream comes; the stream guards against bombs itself."""
    with tarfile.open(fileobj=cast("IO[bytes]", _Forward(stream)), mode="r:") as archive:
        count = total = 0
        while (info := archive.next()) is not None:
            cast(Any, archive).members.clear()  # tarfile remembers every member it has seen
            if info.isdir() or is_hidden(info.name):
                continue
            count, total = count + 1, total + info.size
            if count > limits.members or total > limits.total_bytes:
                large = f"unpacks to more than {limits.total_bytes >> 20} MiB"
                yield Member("", refused=large if count <= limits.members else f"more than {limits.members} members")
                return
            refused = _why_not_tar(info, limits)
            opened = None if refused else archive.extractfile(info)
            yield Member(info.name, Stream(_InBlocks(opened)) if opened else None, refused)


def _why_not_tar(info: tarfile.TarInfo, limits: Limits) -> str:
    if unsafe_name(info.name):
        return "path that leaves the archive"
    if not info.isreg() or info.issparse():  # a sparse file is mostly holes that cost nothing to claim
        return "link or device"
    if info.size > limits.member_bytes:
        return f"unpacks to more than {limits.member_bytes >> 20} MiB"
    return ""


class _InBlocks:
    """A member, never more of it at once than the largest header: tarfile passes on any size that it is asked for."""

    def __init__(self, member: IO[bytes]) -> None:
        self._member = member

    def read(self, size: int, /) -> bytes:
        return self._member.read(min(size, TAR_HEADER))


class _Forward:
    """A stream that tarfile believes it can seek in; it only ever does so forward."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > TAR_HEADER:
            raise Unreadable("archive with a header too large")
        pieces = []
        while size:
            block = self._stream.read(size)
            if not block:
                break
            pieces.append(block)
            size -= len(block)
            self._at += len(block)
        return b"".join(pieces)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or offset < self._at:
            raise Unreadable("archive that is not in order")
        while self._at < offset and self.read(min(offset - self._at, TAR_HEADER)):
            pass
        return self._at

    def seekable(self) -> bool:
        return True
