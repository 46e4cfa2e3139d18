"""Parsers that nobody should run on untrusted files in their own process: each file is parsed in a child process.

The child has limits on CPU time and memory, and no credentials in its environment. It may hang, crash or take all its
memory: that is then the reason why this one file is skipped.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Self

from zero2all.corpus.readers import reader_child
from zero2all.corpus.readers.base import (
    NO_LIBARCHIVE,
    NOT_INSTALLED,
    ReadLimits,
    UnreadableFileError,
    UnreadableItemError,
)
from zero2all.errors import Z2aError

PROGRAM = Path(reader_child.__file__)
OPTIONAL_PACKAGES = ("ijson", "ftfy", "resiliparse", "pypdf", "cryptography")
ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "LIBARCHIVE")
SECONDS_PER_MIB = 8  # of the file, beside the seconds that every file may take
EXIT_SECONDS = 10.0  # for a child to end by itself
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
        self._file, self._is_late = file, False
        size = file.seek(0, io.SEEK_END)
        self._seconds = limits.reader_seconds + SECONDS_PER_MIB * (size >> 20)
        ours, theirs = socket.socketpair()
        largest = max(limits.record_bytes, reader_child.BLOCK_BYTES)
        numbers = (theirs.fileno(), size, self._seconds, limits.reader_memory, largest)
        command = [sys.executable, "-P", "-B", os.fspath(PROGRAM), kind, *map(str, numbers)]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**environment, "LC_CTYPE": "C.UTF-8"},
                    process_group=0,  # Ctrl-C is this process's to handle
                )
            except OSError as error:  # not the file's fault
                ours.close()
                raise Z2aError(f"cannot start a process that reads {kind} files: {error.strerror}") from error
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._message_bytes = largest + 1  # and a code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

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
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self._is_late = True
                    self._process.kill()
                message = self._connection.recv_bytes(self._message_bytes)
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
            self._connection.send_bytes(message)
        except OSError as error:
            raise UnreadableFileError(self._exit_reason()) from error

    def _exit_reason(self) -> str:
        self._connection.close()  # it has nothing left to wait for
        try:
            status = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._is_late or status == -signal.SIGXCPU:
            return f"takes more than {self._seconds} s to read"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"crashed its reader ({name})"
