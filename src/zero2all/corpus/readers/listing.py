"""Where the files of a source are: local paths, globs, and whatever fsspec can reach."""

from __future__ import annotations

import glob
import hashlib
import os
import posixpath
import re
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Literal

from zero2all.base.errors import UsageError
from zero2all.base.paths import is_url, open_url, resolve_store, store_errors
from zero2all.corpus.readers.base import UnreadableFileError
from zero2all.recipe import SourceRecipe, TakeRecipe

LINK_OUTSIDE_SOURCE = "link out of the source (follow_links: true reads it)"
NOT_TAKEN = "not taken"  # beyond the part of the source that the recipe asks for
NOT_A_REGULAR_FILE = "link or device"  # and FIFOs and sockets, as in archives
EXCLUDED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages", "dist-packages", "__MACOSX"}


@dataclass(frozen=True)
class FileRange:
    """A part of a large file that can be read alone: a range of bytes of JSONL, or of row groups of Parquet."""

    file_format: Literal["jsonl", "parquet"]
    start: int
    stop: int
    first_row: int = 0  # of a Parquet file


@dataclass(frozen=True, slots=True)
class RawFile:
    """One file, as plain data: it can be sent to another process and opened there."""

    path: str  # local, or a URL
    name: str  # below the path that the recipe gives, with forward slashes on every system, as clean text
    bytes: int
    modified_ns: int = 0
    etag: str = ""  # a remote store's substitute for a time
    skip_reason: str = ""  # why it is not opened
    file_range: FileRange | None = None  # of a file that several tasks read; ``bytes`` is then its share of the file

    @classmethod
    def from_path(cls, path: Path, top: Path | None = None, skip_reason: str = "") -> RawFile:
        name = path.relative_to(top).as_posix() if top is not None and path != top else path.name
        clean = os.fsencode(name).decode("utf-8", "replace")
        if skip_reason:
            return cls(os.fspath(path), clean, 0, skip_reason=skip_reason)
        try:
            status = path.stat()
        except OSError:  # a dangling link, say: opening it fails later, and is counted then
            return cls(os.fspath(path), clean, 0)
        return cls(os.fspath(path), clean, status.st_size, status.st_mtime_ns)

    @property
    def fingerprint(self) -> str:
        """Changes when the file does, without reading it."""
        of_range = f"-{self.file_range.start}-{self.file_range.stop}" if self.file_range else ""
        return f"{self.bytes}-{self.etag or self.modified_ns}{of_range}{self.skip_reason}"

    @property
    def name_hash(self) -> int:
        """64 bits, the same wherever the directory is, and for every Unicode form of the name."""
        name = unicodedata.normalize("NFC", self.name).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())

    def open(self) -> BinaryIO:
        if self.skip_reason:
            raise UnreadableFileError(self.skip_reason)
        if not is_url(self.path):
            # Python's open takes names that are not UTF-8.
            return open(self.path, "rb", opener=_open_regular)
        return open_url(self.path)

    def has_changed(self, opened: BinaryIO) -> bool:
        """Whether a local file, open, is another than the one that was listed: written to since, or truncated."""
        if is_url(self.path) or not self.modified_ns:
            return False
        status = os.fstat(opened.fileno())
        is_resized = self.file_range is None and status.st_size != self.bytes
        return is_resized or status.st_mtime_ns != self.modified_ns


def _open_regular(path: str, flags: int) -> int:
    """Never waits: opening a FIFO would, for a writer that may never come, and a device may do anything.

    Checked before it is opened, since opening alone has effects on a FIFO or a device, and again when it is open,
    since it may have been replaced in between.
    """
    if _is_special(os.stat(path).st_mode):
        raise UnreadableFileError(NOT_A_REGULAR_FILE)
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if _is_special(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFileError(NOT_A_REGULAR_FILE)
    return descriptor


def _is_special(mode: int) -> bool:
    """A directory is not: Python's open names that error itself."""
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def is_hidden(name: str) -> bool:
    """Caches, version control and the like, which nobody means by giving the directory above."""
    parts = name.split("/")
    return any((part.startswith(".") and part.strip(".")) or part in EXCLUDED_DIRECTORIES for part in parts)


def list_files(source: SourceRecipe) -> list[RawFile]:
    """Every file of a source in a fixed order."""
    found: dict[str, RawFile] = {}
    for pattern in source.paths:
        files = list(
            _list_remote(pattern) if is_url(pattern) else _list_local(pattern, follow_links=source.follow_links)
        )
        if not files:
            raise UsageError(f"corpus source {source.name!r}: {_not_found_message(pattern)}")
        for file in files:
            if not is_excluded(file.name, source.exclude):
                found.setdefault(file.path, file)
    files = list(found.values())
    return _take_files(files, source.take.files) if isinstance(source.take, TakeRecipe) else files


def _take_files(files: list[RawFile], count: int) -> list[RawFile]:
    """Skip all but ``count`` of the files that can be opened. They are chosen by name: the directory may move."""
    ranked = sorted((file for file in files if not file.skip_reason), key=lambda file: file.name_hash)
    refused = {file.path for file in ranked[count:]}
    return [
        replace(file, bytes=0, modified_ns=0, etag="", skip_reason=NOT_TAKEN) if file.path in refused else file
        for file in files
    ]


def is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Compared in one Unicode form: macOS may list a name in another one (NFD) than the recipe is written in."""
    name = unicodedata.normalize("NFC", name)
    return any(fnmatch(name, unicodedata.normalize("NFC", pattern)) for pattern in patterns)


def find_file(path: str) -> RawFile:
    """One file by its path or URL; for a directory or a pattern, the first file it gives."""
    files = _list_remote(path) if is_url(path) else _list_local(path)
    file = next(iter(files), None)
    if file is None or (not is_url(file.path) and not os.path.exists(file.path)):
        raise UsageError(_not_found_message(path))
    return file


def path_problem(pattern: str, *, follow_links: bool = False) -> str | None:
    """Why a path gives no file. A URL is not looked up, and a directory is searched only up to its first file."""
    if is_url(pattern):
        return None
    try:
        tops, root = _find_tops(pattern, follow_links=follow_links)
        limit = None if follow_links else root
        has_files = any(any(_walk(os.fspath(top), set(), limit)) if top.is_dir() else top.exists() for top in tops)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if has_files else _not_found_message(pattern)


def _not_found_message(pattern: str) -> str:
    if not pattern:
        return "empty path; name a file, a directory or a glob"
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        return f"no files in {path}"
    relative = "" if is_url(path) or os.path.isabs(path) else f" (relative to {os.getcwd()})"
    return f"nothing at {path}{relative}"


def _list_local(pattern: str, *, follow_links: bool = False) -> Iterator[RawFile]:
    """Files below what the pattern names. Without ``follow_links`` no link leads out of there: a folder that was
    unpacked from a download may hold links to anything that this machine has."""
    found, root = _find_tops(pattern, follow_links=follow_links)
    for top in found:
        if not follow_links and not _is_inside(top, root):
            yield RawFile.from_path(top, top, LINK_OUTSIDE_SOURCE)
            continue
        below = _walk(os.fspath(top), set(), None if follow_links else root) if top.is_dir() else [os.fspath(top)]
        for path in map(Path, sorted(below, key=lambda name: name.split(os.sep))):
            leaves = not follow_links and path != top and os.path.islink(path) and not _is_inside(path, root)
            yield RawFile.from_path(path, top, LINK_OUTSIDE_SOURCE if leaves else "")


def _find_tops(pattern: str, *, follow_links: bool) -> tuple[list[Path], str]:
    """The files and directories that a path or glob names, and the directory that links must not lead out of."""
    if not pattern:
        return [], ""
    pattern = os.path.expanduser(pattern)
    if os.path.exists(pattern):  # named by the user, and so good even if it is a link
        return [Path(pattern)], os.path.realpath(pattern)
    return _glob_local(pattern, follow_links=follow_links)


def _glob_local(pattern: str, *, follow_links: bool) -> tuple[list[Path], str]:
    """What a pattern finds, and the folder it starts from: its part before the first wildcard."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    start = Path(*parts[:fixed])
    if follow_links:
        found = list(map(Path, glob.glob(pattern, recursive=True)))
    else:  # pathlib's "**" enters no links; glob's goes round in circles of them
        wanted = [part if part == "**" else re.sub(r"\*\*+", "*", part) for part in parts[fixed:]]
        found = [
            path
            for path in start.glob(os.path.join(*wanted))
            if not any(part.startswith(".") and part not in wanted for part in path.parts[fixed:])
        ]
    return sorted(found, key=os.fspath), os.path.realpath(start)


def _is_inside(path: str | Path, root: str) -> bool:
    """Where the path really leads. realpath takes links in a circle too, which lead nowhere."""
    return Path(os.path.realpath(path)).is_relative_to(root)


def _walk(directory: str, visited: set[str], root: str | None) -> Iterator[str]:
    """Every file below; links are followed once, and none out of ``root``. A directory that may not be entered stands
    for itself."""
    visited.add(os.path.realpath(directory))
    try:
        with os.scandir(directory) as scanned:  # it knows the kinds of entries, so that only links are looked up
            entries = list(scanned)
    except OSError:
        yield directory
        return
    for entry in entries:
        if is_hidden(entry.name):
            continue
        leaves = root is not None and entry.is_symlink() and not _is_inside(entry.path, root)
        if leaves or not _is_directory(entry):
            yield entry.path
        elif os.path.realpath(entry.path) not in visited:
            yield from _walk(entry.path, visited, root)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links
        return False


def _list_remote(pattern: str) -> Iterator[RawFile]:
    filesystem, inner = resolve_store(pattern)
    is_web = pattern.startswith(("http://", "https://"))
    try:
        with store_errors(pattern):
            if glob.has_magic(inner) and not is_web:  # a "?" in a web address is a query
                entries = filesystem.glob(inner, detail=True)
            elif is_web or not filesystem.isdir(inner):
                entries = {inner: filesystem.info(inner)}
            else:
                entries = filesystem.find(inner, detail=True)
    except FileNotFoundError:
        return
    top = posixpath.dirname(inner) if glob.has_magic(inner) or len(entries) == 1 else inner
    for path, info in sorted(entries.items()):
        name = posixpath.relpath(path, top) if path.startswith(top) else posixpath.basename(path)
        if info.get("type") != "directory" and not is_hidden(name):
            url = path if is_web else filesystem.unstrip_protocol(path)
            yield RawFile(url, name, int(info.get("size") or 0), 0, _etag(info))


def _etag(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "last_commit"):
        if info.get(key):
            return str(info[key]).strip('"')
    return ""
