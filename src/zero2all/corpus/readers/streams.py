"""Streams that are read once, from front to back: looked into, unpacked, counted, cut into lines."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from zero2all.corpus.readers.base import Limits, Unreadable

BLOCK = 1 << 20
HEAD = 1 << 20  # what formats and encodings are told from

MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".lz4": "lz4"}


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Stream:
    """Reads forward, and can look at what comes without taking it."""

    def __init__(self, source: Readable) -> None:
        self._source, self._ended = source, False
        self._ahead, self._at = b"", 0  # what has been looked at, and how much of it has been taken

    def peek(self, size: int = HEAD) -> bytes:
        """The next ``size`` bytes, or all there are."""
        while len(self._ahead) - self._at < size and not self._ended:
            block = self._source.read(max(size - len(self._ahead) + self._at, 1))
            self._ended = not block
            self._ahead, self._at = self._ahead[self._at :] + block, 0
        return self._ahead[self._at : self._at + size]

    def read(self, size: int = BLOCK, /) -> bytes:
        """Up to ``size`` bytes; nothing only at the end."""
        if self._at < len(self._ahead):
            block = self._ahead[self._at : self._at + size]
            self._at += len(block)
            return block
        self._ahead, self._at = b"", 0
        return b"" if self._ended else self._source.read(size)

    def blocks(self) -> Iterator[bytes]:
        while block := self.read(BLOCK):
            yield block

    def read_whole(self, limit: int, what: str) -> bytes:
        pieces, size = [], 0
        for block in self.blocks():
            pieces.append(block)
            size += len(block)
            if size > limit:
                raise Unreadable(f"{what} larger than {limit >> 20} MiB")
        return b"".join(pieces)


class Counted:
    """Counts what goes through it."""

    def __init__(self, source: Readable) -> None:
        self.source, self.bytes = source, 0

    def read(self, size: int, /) -> bytes:
        block = self.source.read(size)
        self.bytes += len(block)
        return block


class Guarded:
    """An unpacked stream that stops when it gives more than its packed form can honestly hold."""

    def __init__(self, source: Readable, packed: Callable[[], int], limit: int, limits: Limits) -> None:
        self.source, self.packed, self.limit, self.limits = source, packed, limit, limits
        self.bytes = 0

    def read(self, size: int, /) -> bytes:
        block = self.source.read(size)
        self.bytes += len(block)
        if self.bytes > self.limit:
            raise Unreadable(f"unpacks to more than {self.limit >> 20} MiB")
        if self.bytes > self.limits.ratio_after and self.bytes > self.limits.ratio * max(self.packed(), 1):
            raise Unreadable(f"unpacks to more than {self.limits.ratio} times its size")
        return block


class _PackedFile(io.RawIOBase):
    """What Arrow and lzma want to read from."""

    def __init__(self, source: Readable) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        block = self._source.read(len(view))
        view[: len(block)] = block
        return len(block)


def compression_of(head: bytes) -> str | None:
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def unpacked(stream: Stream, compression: str, limits: Limits) -> Stream:
    """The same stream without its compression, guarded against bombs."""
    packed = Counted(stream)
    opened: Readable
    if compression == "xz":
        opened = lzma.LZMAFile(io.BufferedReader(_PackedFile(packed), BLOCK))  # noqa: SIM115
    elif compression == "gzip":
        opened = _Gzip(packed)
    else:
        opened = pa.CompressedInputStream(pa.PythonFile(_PackedFile(packed), mode="r"), compression)
    return Stream(Guarded(opened, lambda: packed.bytes, limits.total_bytes, limits))


class _Gzip:
    """Any number of gzip members one after the other, as WARC files have them. Zeros after the last are padding."""

    def __init__(self, source: Readable) -> None:
        self._source, self._packed = source, b""
        self._unpacker = zlib.decompressobj(wbits=31)
        self._inside = True

    def read(self, size: int, /) -> bytes:
        while True:
            if not self._packed:
                self._packed = self._source.read(1 << 16)
                if not self._packed:
                    if self._inside:
                        raise EOFError("gzip ends early")
                    return b""
            if not self._inside:
                self._packed = self._packed.lstrip(b"\0")
                if not self._packed:
                    continue
                self._unpacker, self._inside = zlib.decompressobj(wbits=31), True
            block = self._unpacker.decompress(self._packed, size)
            self._packed = self._unpacker.unconsumed_tail
            if self._unpacker.eof:
                self._packed, self._inside = self._unpacker.unused_data, False
            if block:
                return block


def lines(stream: Stream, limit: int) -> Iterator[bytes | None]:
    """Lines with their ends. None stands for one longer than ``limit``, which is passed over."""
    return chain.from_iterable(line_batches(stream, limit))


def line_batches(stream: Stream, limit: int) -> Iterator[list[bytes | None]]:
    """The same, as many at a time as a block has."""
    pieces: list[bytes] = []  # of the line that is not finished yet; joined once, however long it is
    size = 0
    for block in stream.blocks():
        batch: list[bytes | None] = list(block.splitlines(keepends=True) if b"\r" not in block else _split(block))
        last = None if block.endswith(b"\n") else batch.pop()
        if batch and size:
            size += len(batch[0] or b"")
            batch[0] = b"".join([*pieces, batch[0] or b""]) if size <= limit else None
            pieces, size = [], 0
        if limit < len(block):
            batch = [line if line is not None and len(line) <= limit else None for line in batch]
        if batch:
            yield batch
        if last:
            size += len(last)
            pieces = [*pieces, last] if size <= limit else []
    if size:
        yield [b"".join(pieces) if size <= limit else None]


def _split(block: bytes) -> list[bytes]:
    """At line feeds only: a carriage return alone may stand inside a record."""
    pieces = block.split(b"\n")
    whole = [piece + b"\n" for piece in pieces[:-1]]
    return [*whole, pieces[-1]] if pieces[-1] else whole
