"""A file on a server: what is known of it before its download, and where it may go on this machine.

``fetch.json`` lists what was downloaded and from where.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zero2all import __version__
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import read_record, sha256_file, write_record
from zero2all.base.network.http_client import Backoff, HttpClient, TransientError, timestamp
from zero2all.base.records import decode_json, parse_record
from zero2all.base.redact import redact

MANIFEST_NAME = "fetch.json"
WORK_DIRECTORY = ".z2a-fetch"  # hidden, so that a corpus does not read it
MAX_NAME_BYTES = 255  # of one component, on every file system
MAX_PATH_BYTES = 2048
# Control characters, line separators, those that change the text direction, and lone surrogates.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MIN_AGE = 60.0  # seconds; a file that was changed just now may be changed again within the same second
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)")
_LENGTH = re.compile(r"\d{1,18}")


@dataclass(frozen=True)
class RemoteFile:
    source: str
    """What the user named, without secrets."""
    url: str = field(repr=False)
    path: str
    """Where it goes, below the directory of the download. Chosen by the server, so it is checked before it is used."""
    size: int | None
    """None if the server does not say."""
    validator: str | None
    """What changes when the file does: ``sha256:…`` or ``git-blob:…`` of its content, else ``etag:…`` or
    ``last-modified:…``, else None."""
    revision: str | None = None
    """The commit, on the Hub."""
    has_strong_validator: bool = False
    """Whether the validator, if it comes from a web server, changes with every byte."""

    @property
    def can_resume(self) -> bool:
        """Whether parts from several requests make one file: they are of one version, or the checksum tells."""
        return self.size is not None and (self.has_checksum or self.has_strong_validator)

    @property
    def http_validator(self) -> str | None:
        """The validator from the header of the web server; None if there was none, or if there is a checksum."""
        return None if self.validator is None or self.has_checksum else self.validator.partition(":")[2]

    @property
    def has_checksum(self) -> bool:
        return self.validator is not None and self.validator.startswith(("sha256:", "git-blob:"))

    @property
    def has_git_checksum(self) -> bool:
        return self.validator is not None and self.validator.startswith("git-blob:")

    @property
    def identity(self) -> str | None:
        """Equal for two files only if their content is. A mirror has the same content at another URL."""
        return self.validator if self.has_checksum or self.validator is None else f"{redact(self.url)} {self.validator}"

    def checksum_problem(self, digests: FileDigests) -> str | None:
        """What is wrong with content that was downloaded."""
        found = f"git-blob:{digests.git_blob}" if self.has_git_checksum else f"sha256:{digests.sha256}"
        return (
            f"its checksum is {found}, not {self.validator}" if self.has_checksum and found != self.validator else None
        )


@dataclass(frozen=True)
class FileDigests:
    sha256: str
    git_blob: str | None
    """What git calls the content: the checksum that the Hub has of small files."""

    @classmethod
    def of(cls, path: Path, *, with_git: bool) -> FileDigests:
        git_blob = None
        if with_git:
            prefix = f"blob {path.stat().st_size}\0".encode()
            git_blob = hashlib.sha1(prefix + path.read_bytes(), usedforsecurity=False).hexdigest()
        return cls(sha256_file(path), git_blob)


@dataclass(frozen=True)
class ContentRange:
    """What part of a file a response has."""

    start: int
    total: int | None


@dataclass(frozen=True)
class ResponseHeaders:
    """What the headers say of a file, as far as they are valid. They are as trustworthy as the server."""

    headers: Mapping[str, str]

    @property
    def length(self) -> int | None:
        text = self.headers.get("Content-Length", "").strip()
        return int(text) if _LENGTH.fullmatch(text) else None

    @property
    def content_range(self) -> ContentRange | None:
        match = _CONTENT_RANGE.fullmatch(self.headers.get("Content-Range", "").strip())
        return match and ContentRange(int(match[1] or 0), None if match[2] == "*" else int(match[2]))

    @property
    def validator(self) -> str | None:
        """What changes when the file does."""
        for name in ("ETag", "Last-Modified"):
            if value := self.headers.get(name, "").strip():
                return f"{name.lower()}:{value[:512]}"
        return None

    @property
    def has_strong_validator(self) -> bool:
        """Whether the validator changes with every byte of the file, so that parts can be combined (RFC 9110, 8.8)."""
        if etag := self.headers.get("ETag", "").strip():
            return not etag.startswith("W/")
        sent, modified = (timestamp(self.headers.get(name, "")) for name in ("Date", "Last-Modified"))
        return sent is not None and modified is not None and sent - modified >= MIN_AGE


def probe_file(client: HttpClient, stop: threading.Event, source: str, url: str, path: str) -> RemoteFile:
    """What a server says of a file when asked for its first byte: not all know HEAD."""

    def probe() -> RemoteFile:
        with closing(client.open(url, {"Range": "bytes=0-0"})) as response:
            headers, status = ResponseHeaders(response.headers), response.status_code
            size, part = headers.length, headers.content_range
            if status in (206, 416) and part is not None and part.start == 0 and part.total is not None:
                size = part.total
            elif status != 200:
                raise TransientError(f"status {status} without a valid Content-Range")
            strong = headers.has_strong_validator
            return RemoteFile(source, url, path, size, headers.validator, has_strong_validator=strong)

    return Backoff(redact(url), stop).retry(probe)


def name_problem(path: str) -> str | None:
    """Why a relative path with forward slashes is not safe to write to."""
    if _INVISIBLE.search(path):
        return "has control characters"
    if "\\" in path:
        return "has a backslash"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a plain relative path"
    if parts[0] in (WORK_DIRECTORY, MANIFEST_NAME):
        return "is a name that the download itself uses"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts) or len(path.encode()) > MAX_PATH_BYTES:
        return "is too long"
    return None


def is_in_hidden_directory(path: str) -> bool:
    """Whether other programs may run or read a file as their own, such as ``.git/hooks/…``. Corpora skip these."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/")[:-1])


def check_paths(paths: list[str]) -> None:
    """Raise unless all files can be written side by side, each below one directory."""
    taken: set[str] = set()
    for path in paths:
        if problem := name_problem(path):
            raise UsageError(
                f"the server names a file {path[:200]!r}, which {problem}: nothing was downloaded; "
                "leave the file out with --exclude"
            )
        if path in taken:
            raise UsageError(f"two files would be written to {path}: download them to different directories (--to)")
        taken.add(path)
    for path in paths:
        parts = path.split("/")
        for above in ("/".join(parts[:length]) for length in range(1, len(parts))):
            if above in taken:
                raise UsageError(f"{above} would be a file and a directory: leave one of them out with --exclude")


@dataclass(frozen=True)
class FetchedFile:
    """A file that was downloaded."""

    path: str
    """Below the directory of ``fetch.json``."""
    source: str
    """What the user named."""
    url: str
    size: int
    sha256: str
    revision: str | None
    """The commit, on the Hub."""
    identity: str | None
    """What the server had to say of the content: equal as long as the file is the same."""
    modified_ns: int
    """Time of the last change on this disk."""

    @classmethod
    def of(cls, file: RemoteFile, local: Path, sha256: str) -> FetchedFile:
        status = local.stat()
        return cls(
            path=file.path,
            source=file.source,
            url=redact(file.url),
            size=status.st_size,
            sha256=sha256,
            revision=file.revision,
            identity=file.identity,
            modified_ns=status.st_mtime_ns,
        )

    def is_version_of(self, file: RemoteFile) -> bool:
        """Whether the server still has the version that was downloaded."""
        if self.identity is None or file.identity is None:
            return self.identity == file.identity and self.url == redact(file.url) and self.size == file.size
        return self.identity == file.identity or file.validator == f"sha256:{self.sha256}"

    def is_intact(self, local: Path) -> bool:
        """Whether a file on disk is as it was downloaded. Its content is read only if its time is another."""
        status = local.stat()
        if status.st_size != self.size:
            return False
        return status.st_mtime_ns == self.modified_ns or sha256_file(local) == self.sha256


@dataclass(frozen=True)
class FetchManifest:
    kind: str
    zero2all: str
    files: list[FetchedFile]


class FetchRecord:
    """The files of a directory by path. Each is noted in a journal at once, and in the manifest in the end."""

    def __init__(self, directory: Path, work: Path) -> None:
        self._manifest, self._journal = directory / MANIFEST_NAME, work / "finished.jsonl"
        self._lock = threading.Lock()
        self.files: dict[str, FetchedFile] = {}
        if self._manifest.exists():
            self.files = {file.path: file for file in read_record(FetchManifest, self._manifest).files}
        if self._journal.exists():  # of a command that was killed
            self.files |= {file.path: file for file in self._read_journal()}
            self.write()

    def add(self, file: FetchedFile) -> None:
        with self._lock, open(self._journal, "ab") as stream:
            stream.write(json.dumps(asdict(file), ensure_ascii=False).encode() + b"\n")
            self.files[file.path] = file

    def write(self) -> None:
        with self._lock:
            if not self.files:
                return
            files = [self.files[path] for path in sorted(self.files)]
            write_record(self._manifest, FetchManifest("fetch", __version__, files))
            self._journal.unlink(missing_ok=True)

    def _read_journal(self) -> list[FetchedFile]:
        """A line that was cut off is skipped: its file is not in place yet."""
        found = []
        for line in self._journal.read_bytes().split(b"\n"):
            try:
                found.append(parse_record(FetchedFile, decode_json(line), self._journal))
            except (ValueError, Z2aError):
                continue
        return found
