"""Records of readers, errors, and read limits."""

from __future__ import annotations

import csv
import lzma
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pyarrow as pa

from zero2all.base.errors import Z2aError, need

MAX_RAW_CHARACTERS = 300  # characters of a broken record, enough for a person to recognise it
# What libraries raise on damaged files.
READ_ERRORS = (
    *(OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError),
    *(zipfile.BadZipFile, tarfile.TarError, csv.Error, pa.ArrowException),
)
TOO_DEEP = "nested too deep"
MAX_NESTING = 200  # levels of a record; Python's own recursion ends at 1000, less what is in use where a record is met
NOT_INSTALLED = "needs pip install 'zero2all[corpus]'"
NO_LIBARCHIVE = "needs the system library libarchive (apt-get install libarchive13, or brew install libarchive)"
# Why files are skipped that can be read after an installation.
MISSING_REASONS = frozenset({NOT_INSTALLED, NO_LIBARCHIVE})


class UnreadableFileError(Exception):
    """This file is skipped; the message is the reason it is counted under."""


class UnreadableItemError(UnreadableFileError):
    """This page, member or record cannot be read; the next one may be."""


@dataclass(slots=True)
class BrokenRecord:
    """Stands for a record that could not be parsed, so that it can be counted and quarantined."""

    reason: str
    """Short, and the same for all of its kind."""
    place: str = ""
    """Where in the file."""
    raw: str = ""
    """How it begins."""

    def __post_init__(self) -> None:
        self.raw = self.raw[:MAX_RAW_CHARACTERS]


class SkippedMember(BrokenRecord):
    """Stands for a member of an archive that was not read, or for the rest of the archive."""


class TextRecord(dict[str, str | int]):
    """A record made of a file that is one text; a recipe's field names do not apply to it."""


# Consecutive records of a user's file, and stand-ins for the broken ones.
RecordChunk = list[dict[str, Any] | BrokenRecord]


def is_too_deep(record: dict[str, Any]) -> bool:
    """Whether a record is nested deeper than ``MAX_NESTING``. Level by level, to avoid recursion."""
    level: list[Any] = [value for value in record.values() if isinstance(value, dict | list | tuple)]
    for _ in range(MAX_NESTING):
        if not level:
            return False
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list | tuple)
        ]
    return bool(level)


@dataclass(frozen=True)
class ReadLimits:
    """What a file may cost. Beyond it the file, the member or the record is skipped and counted."""

    record_bytes: int = 64 * 2**20
    """One line, JSON value, page or article; read fully into memory."""
    max_document_characters: int = 8 * 2**20
    """Characters of plain text in one document; a longer file is split at line ends. Fewer than ``too_long`` drops."""
    seekable_in_memory: int = 256 * 2**20
    """Parquet, PDF, DOCX or EPUB inside an archive or a compressed file; it cannot be read from front to back."""
    package_bytes: int = 256 * 2**20
    """Parts of one DOCX or EPUB, unpacked, together."""
    reader_seconds: int = 120
    """CPU time of a process that parses one PDF, EPUB, .7z or .rar file; it gets more for a large file."""
    reader_memory: int = 2**30
    """Address space of such a process."""
    members: int = 500_000
    """Files in one archive."""
    member_bytes: int = 64 * 2**30
    """One member of an archive, unpacked."""
    total_bytes: int = 1024 * 2**30
    """One archive or compressed file, unpacked."""
    max_compression_ratio: int = 250
    """Bytes unpacked for one byte packed. Text and code stay below 30; only bombs and blanks go to 1000."""
    ratio_check_bytes: int = 64 * 2**20
    """Unpacked bytes before the ratio is checked."""

    def unpacked_problem(self, size: int, compressed_bytes: int, limit: int) -> str:
        """Why this number of unpacked bytes is too large; empty if it is not."""
        if size > self.ratio_check_bytes and size > self.max_compression_ratio * max(compressed_bytes, 1):
            return self.size_problem(size, limit) or f"unpacks to more than {self.max_compression_ratio} times its size"
        return self.size_problem(size, limit)

    @staticmethod
    def size_problem(size: int, limit: int) -> str:
        return f"unpacks to more than {limit >> 20} MiB" if size > limit else ""


def import_optional(module: str) -> ModuleType:
    """A package of the extra ``corpus``; a file that needs it is skipped where it is not installed."""
    try:
        return need(module, "corpus")
    except Z2aError as error:
        raise UnreadableFileError(NOT_INSTALLED) from error
