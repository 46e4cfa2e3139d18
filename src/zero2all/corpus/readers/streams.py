"""Streams that are read once, from front to back: peeked into, decompressed, counted, split into lines."""

from __future__ import annotations

import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from zero2all.corpus.readers.base import ReadLimits, UnreadableFileError

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 20  # what formats and encodings are detected from

COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
COMPRESSION_BY_EXTENSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".lz4": "lz4"}


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class PeekableStream:
    """Reads forward, and can peek without consuming."""

    def __init__(self, raw: Readable, head: bytes = b"") -> None:
        """``head`` comes before what is read from ``raw``."""
        self._raw, self._ended = raw, False
        self._buffer, self._position = head, 0  # bytes peeked at, and how many of them are consumed

    def peek(self, size: int = HEAD_BYTES) -> bytes:
        """The next ``size`` bytes, or all there are."""
        while len(self._buffer) - self._position < size and not self._ended:
            block = self._raw.read(max(size - len(self._buffer) + self._position, 1))
            self._ended = not block
            self._buffer, self._position = self._buffer[self._position :] + block, 0
        return self._buffer[self._position : self._position + size]

    def read(self, size: int = BLOCK_BYTES, /) -> bytes:
        """Up to ``size`` bytes; nothing only at the end."""
        if self._position < len(self._buffer) or not size:
            block = self._buffer[self._position : self._position + size]
            self._position += len(block)
            return block
        self._buffer, self._position = b"", 0
        return b"" if self._ended else self._raw.read(size)

    def blocks(self) -> Iterator[bytes]:
        while block := self.read(BLOCK_BYTES):
            yield block

    def read_all(self, limit: int, what: str) -> bytes:
        parts, size = [], 0
        for block in self.blocks():
            parts.append(block)
            size += len(block)
            if size > limit:
                raise UnreadableFileError(f"{what} larger than {limit >> 20} MiB")
        return b"".join(parts)


class CountingReader:
    """Counts what goes through it."""

    def __init__(self, raw: Readable) -> None:
        self.raw, self.bytes = raw, 0

    def read(self, size: int, /) -> bytes:
        block = self.raw.read(size)
        self.bytes += len(block)
        return block


class LimitedReader:
    """A decompressed stream that fails when it gives more than its compressed form can plausibly hold."""

    def __init__(self, raw: Readable, compressed_bytes: Callable[[], int], limit: int, limits: ReadLimits) -> None:
        self.raw, self.compressed_bytes, self.limit, self.limits = raw, compressed_bytes, limit, limits
        self.bytes = 0

    def read(self, size: int, /) -> bytes:
        block = self.raw.read(size)
        self.bytes += len(block)
        if reason := self.limits.unpacked_problem(self.bytes, self.compressed_bytes(), self.limit):
            raise UnreadableFileError(reason)
        return block


class _ReadableFile(io.RawIOBase):
    """What Arrow and lzma want to read from."""

    def __init__(self, raw: Readable) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        block = self._raw.read(len(view))
        view[: len(block)] = block
        return len(block)


class _PartReader:
    """Gives what there is, so that nothing before a damaged place is lost."""

    def __init__(self, raw: gzip.GzipFile | lzma.LZMAFile) -> None:
        self._raw = raw

    def read(self, size: int, /) -> bytes:
        return self._raw.read1(size)


def detect_compression(head: bytes) -> str | None:
    return next((name for magic, name in COMPRESSION_BY_MAGIC.items() if head.startswith(magic)), None)


def decompress_stream(stream: PeekableStream, compression: str, limits: ReadLimits) -> PeekableStream:
    """The same stream without its compression, limited against decompression bombs."""
    packed = CountingReader(stream)
    packed_file = io.BufferedReader(_ReadableFile(packed), BLOCK_BYTES)
    opened: Readable
    if compression == "xz":
        opened = _PartReader(lzma.LZMAFile(packed_file))  # noqa: SIM115
    elif compression == "gzip":
        opened = _PartReader(gzip.GzipFile(fileobj=packed_file))
    else:
        opened = pa.CompressedInputStream(pa.PythonFile(_ReadableFile(packed), mode="r"), compression)
    return PeekableStream(LimitedReader(opened, lambda: packed.bytes, limits.total_bytes, limits))


def iter_lines(stream: PeekableStream, limit: int) -> Iterator[bytes | None]:
    """Lines with their ends. None stands for one longer than ``limit``, which is skipped."""
    return chain.from_iterable(iter_line_chunks(stream, limit))


def iter_line_chunks(stream: PeekableStream, limit: int) -> Iterator[list[bytes | None]]:
    """The same, the lines of one block at a time."""
    parts: list[bytes] = []  # of the line that is not finished yet; joined once, however long it is
    size = 0
    for block in stream.blocks():
        batch: list[bytes | None] = list(block.splitlines(keepends=True) if b"\r" not in block else _split_lines(block))
        last = None if block.endswith(b"\n") else batch.pop()
        if batch and size:
            size += len(batch[0] or b"")
            batch[0] = b"".join([*parts, batch[0] or b""]) if size <= limit else None
            parts, size = [], 0
        if limit < len(block):
            batch = [line if line is not None and len(line) <= limit else None for line in batch]
        if batch:
            yield batch
        if last:
            size += len(last)
            parts = [*parts, last] if size <= limit else []
    if size:
        yield [b"".join(parts) if size <= limit else None]


def _split_lines(block: bytes) -> list[bytes]:
    """At line feeds only: a carriage return alone may stand inside a record."""
    parts = block.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines
