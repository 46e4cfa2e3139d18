"""A program of its own that parses one untrusted PDF, .7z or .rar file, or HTML, for ``reader_process``.

It imports nothing of zero2all (``limited_process`` says why). It opens no file: it asks for the bytes. Every message
begins with one of the codes below; the rest is its body.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Callable, Generator
from ctypes import POINTER, c_char, c_int, c_void_p, cast
from multiprocessing.connection import Connection
from typing import Any

NEXT, DATA = b"N", b"D"  # to the child: the next page or member, and more bytes of this member
ALL_TEXT, MAIN_TEXT = b"A", b"M"  # to the child, with HTML: all of its text, or only its main text
READ = b"R"  # from the child: bytes of the file, by offset and size
VALUE, END, BROKEN, FAILED, MISSING = b"V", b"E", b"B", b"F", b"M"  # answers; after BROKEN the next item may follow
READ_REQUEST = struct.Struct("<QQ")
BLOCK_BYTES = 1 << 18
ENCRYPTED = "encrypted"

Answers = Generator[bytes, bytes, None]  # whole messages; each is sent a command


class ParentFile(io.RawIOBase):
    """The file to parse, read through the parent."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection, self._size, self._position = connection, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError("seek before the start")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        self._connection.send_bytes(READ + READ_REQUEST.pack(self._position, min(len(buffer), BLOCK_BYTES)))
        block = self._connection.recv_bytes()
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)


def read_pdf(file: io.BufferedReader[ParentFile]) -> Answers:
    """First the title, then the text of each page."""
    import pypdf
    from pypdf.errors import DependencyError

    try:
        reader = pypdf.PdfReader(file)
        if reader.is_encrypted and not reader.decrypt(""):
            yield FAILED + ENCRYPTED.encode()
            return
        yield VALUE + _pdf_title(reader).encode("utf-8", "surrogatepass")
        for page in reader.pages:
            try:
                text = page.extract_text()
            except (DependencyError, MemoryError):
                raise
            except Exception:  # pypdf raises nearly anything on what it does not understand
                yield BROKEN + b"broken page"
            else:
                yield VALUE + text.encode("utf-8", "surrogatepass")
    except DependencyError:  # the algorithm of an encrypted file
        yield MISSING


def _pdf_title(reader: Any) -> str:
    try:
        return str(reader.metadata.title or "")
    except Exception:  # metadata may be broken where the pages are not
        return ""


def read_pages(file: io.BufferedReader[ParentFile]) -> Answers:
    """The title and the text of each page that comes with a command; nothing for the first command."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    command = yield VALUE
    while True:
        try:
            tree = HTMLTree.parse(command[1:].decode("utf-8", "surrogatepass"))
            text = extract_plain_text(tree, main_content=command[:1] == MAIN_TEXT, alt_texts=False)
            title = (tree.title or "").replace("\0", "")
        except MemoryError:
            raise
        except Exception:  # a page that the parser does not take
            command = yield BROKEN + b"broken page"
        else:
            command = yield VALUE + f"{title}\0{text}".encode("utf-8", "surrogatepass")


_ENCRYPTION = re.compile("encrypt|crypto|passphrase", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile("allocate|out of memory", re.IGNORECASE)


def read_archive(archive_format: str) -> Callable[[io.BufferedReader[ParentFile]], Answers]:
    """For each member its name, size and type; then, as long as they are asked for, its bytes."""

    def read(file: io.BufferedReader[ParentFile]) -> Answers:
        import libarchive

        is_encrypted = libarchive.ffi.ffi("entry_is_encrypted", [c_void_p], c_int)  # not among those it declares
        block = (c_char * BLOCK_BYTES)()

        def read_block(archive: Any, context: Any, pointer: Any) -> int:
            cast(pointer, POINTER(c_void_p))[0] = cast(block, c_void_p)
            return file.readinto(block)

        def seek(archive: Any, context: Any, offset: int, whence: int) -> int:
            return file.seek(offset, whence)

        try:
            reader = libarchive.custom_reader(read_block, archive_format, "none", seek_func=seek)
            with reader as archive:
                for entry in archive:
                    about = {**_describe(entry), "encrypted": bool(is_encrypted(entry._entry_p))}
                    command = yield VALUE + json.dumps(about).encode()
                    blocks = entry.get_blocks(BLOCK_BYTES)
                    while command == DATA:
                        try:
                            answer = VALUE + next(blocks, b"")
                        except libarchive.ArchiveError as error:
                            answer = BROKEN + _archive_reason(error).encode()
                        command = yield answer
        except libarchive.ArchiveError as error:
            yield FAILED + _archive_reason(error).encode()

    return read


def _describe(entry: Any) -> dict[str, Any]:
    regular = entry.isreg and not entry.islnk
    return {"name": entry.pathname or "", "size": entry.size or 0, "directory": entry.isdir, "regular": regular}


def _archive_reason(error: Exception) -> str:
    message = str(error)
    if _OUT_OF_MEMORY.search(message):
        raise MemoryError
    return ENCRYPTED if _ENCRYPTION.search(message) else f"broken file ({type(error).__name__})"


READERS: dict[str, Callable[[io.BufferedReader[ParentFile]], Answers]] = {
    "pdf": read_pdf,
    "html": read_pages,
    "7z": read_archive("7zip"),
    "rar": read_archive("rar"),
    "rar5": read_archive("rar5"),
}


def serve(connection: Connection, answers: Answers, memory: int, largest: int) -> None:
    """Answer commands, with up to ``largest`` bytes, until the parent closes the connection."""
    command = connection.recv_bytes()
    first = True
    while True:
        try:
            answer = next(answers, END) if first else answers.send(command)
        except StopIteration:
            answer = END
        except MemoryError:
            answer = FAILED + f"needs more than {memory >> 20} MiB".encode()
        except Exception as error:
            answer = FAILED + f"broken file ({type(error).__name__})".encode()
        first = False
        if len(answer) > largest:
            answer = FAILED + f"text larger than {largest >> 20} MiB".encode()
        connection.send_bytes(answer)
        command = connection.recv_bytes()


def main(connection: Connection, kind: str, size: str, memory: str, largest: str) -> None:
    file = io.BufferedReader(ParentFile(connection, int(size)), BLOCK_BYTES)
    serve(connection, READERS[kind](file), int(memory), int(largest))
