"""Parsers that nobody should run on untrusted files in their own process: each file is parsed in a child process.

It may hang, crash or take all its memory: that is then the reason why this one file is skipped.
"""

from __future__ import annotations

import importlib.util
import io
import struct
import time
from pathlib import Path
from typing import IO, Self

from zero2all.base.limited_process import LimitedProcess
from zero2all.corpus.readers import reader_child
from zero2all.corpus.readers.base import (
    NO_LIBARCHIVE,
    NOT_INSTALLED,
    ReadLimits,
    UnreadableFileError,
    UnreadableItemError,
)

PROGRAM = Path(reader_child.__file__)
OPTIONAL_PACKAGES = ("ftfy", "resiliparse", "pypdf", "cryptography")
SECONDS_PER_MIB = 8  # of the file, beside the seconds that every file may take
WALL_FACTOR = 30  # times the CPU time, for a child that neither computes nor answers; the CPU may be shared by many


def require_package(module: str) -> None:
    """Raise unless the child can import a package of the extra ``corpus``."""
    if importlib.util.find_spec(module) is None:
        raise UnreadableFileError(NOT_INSTALLED)


def require_libarchive() -> None:
    """The package is a binding: it can be installed where the library is not."""
    require_package("libarchive")
    try:
        import libarchive  # noqa: F401
    except (AttributeError, OSError, TypeError) as error:  # no symbols, no file, no name
        raise UnreadableFileError(NO_LIBARCHIVE) from error


def missing_packages() -> list[str]:
    """Packages and libraries without which readers skip some files."""
    missing = [module for module in OPTIONAL_PACKAGES if importlib.util.find_spec(module) is None]
    try:
        require_libarchive()
    except UnreadableFileError:
        missing.append("libarchive")
    return missing


class ReaderProcess:
    """A child process that parses one file, which it reads through this one."""

    def __init__(self, kind: str, file: IO[bytes], limits: ReadLimits) -> None:
        self._file = file
        size = file.seek(0, io.SEEK_END)
        self._seconds = limits.reader_seconds + SECONDS_PER_MIB * (size >> 20)
        largest = max(limits.record_bytes, reader_child.BLOCK_BYTES)
        words = (kind, size, limits.reader_memory, largest)
        self._process = LimitedProcess(PROGRAM, words, self._seconds, limits.reader_memory)
        self._message_bytes = largest + 1  # and a code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.close()

    def parse_html(self, html: str, text: bytes) -> tuple[str, str]:
        """Title and text of a page, from a child of the kind ``html`` that was asked for its first answer."""
        answer = self.ask(text + html.encode("utf-8", "surrogatepass")) or b""
        title, _, content = answer.decode("utf-8", "surrogatepass").partition("\0")
        return title, content

    def ask(self, command: bytes) -> bytes | None:
        """The answer to a command, None at the end of the file."""
        self._send(command)
        code, body = self._receive()
        if code == reader_child.VALUE:
            return body
        if code == reader_child.END:
            return None
        if code == reader_child.MISSING:
            raise UnreadableFileError(NOT_INSTALLED)
        reason = body.decode("utf-8", "replace")
        raise (UnreadableItemError if code == reader_child.BROKEN else UnreadableFileError)(reason)

    def _receive(self) -> tuple[bytes, bytes]:
        deadline = time.monotonic() + WALL_FACTOR * self._seconds
        while True:
            try:
                message = self._process.receive(deadline, self._message_bytes)
                code, body = message[:1], message[1:]
                if code != reader_child.READ:
                    return code, body
                offset, size = reader_child.READ_REQUEST.unpack(body)
            except (EOFError, OSError, struct.error) as error:
                raise UnreadableFileError(self._exit_reason()) from error
            self._file.seek(offset)
            self._send(self._file.read(min(size, reader_child.BLOCK_BYTES)))

    def _send(self, message: bytes) -> None:
        try:
            self._process.connection.send_bytes(message)
        except OSError as error:
            raise UnreadableFileError(self._exit_reason()) from error

    def _exit_reason(self) -> str:
        reason = self._process.exit_reason()
        return f"crashed its reader ({reason})" if reason else f"takes more than {self._seconds} s to read"
