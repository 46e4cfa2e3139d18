"""A file on a server: what is known of it before its download."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.corpus.fetch.http_client import HttpClient, TransientError
from zero2all.corpus.fetch.retry import Backoff
from zero2all.io import sha256_file
from zero2all.redact import redact


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
    accepts_ranges: bool | None = None
    """None: not known yet."""
    has_strong_validator: bool = False
    """Whether the validator, if it is that of a web server, changes with every byte."""

    @property
    def can_combine(self) -> bool:
        """Whether parts from several requests make one file: they are of one version, or the checksum tells."""
        return self.has_checksum or self.has_strong_validator

    @property
    def http_validator(self) -> str | None:
        """As it was in the header of the web server; None if there was none, or if there is a checksum."""
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
    def of(cls, path: Path, with_git: bool) -> FileDigests:
        git_blob = None
        if with_git:
            prefix = f"blob {path.stat().st_size}\0".encode()
            git_blob = hashlib.sha1(prefix + path.read_bytes(), usedforsecurity=False).hexdigest()
        return cls(sha256_file(path), git_blob)


@dataclass(frozen=True)
class ProbedUrl:
    """What a server says of a file when asked for its first byte: not all know HEAD, and this also tells of ranges."""

    size: int | None
    validator: str | None
    has_strong_validator: bool
    accepts_ranges: bool

    @classmethod
    def of(cls, client: HttpClient, url: str, stop: threading.Event) -> ProbedUrl:
        backoff = Backoff(redact(url), stop)
        while True:
            try:
                return cls._ask(client, url)
            except TransientError as error:
                backoff.wait(error)

    @classmethod
    def _ask(cls, client: HttpClient, url: str) -> ProbedUrl:
        with client.get(url, {"Range": "bytes=0-0"}) as response:
            part, is_strong = response.content_range, response.has_strong_validator
            if response.status == 206 and part is not None and part.start == 0 and part.total is not None:
                return cls(part.total, response.validator, is_strong, accepts_ranges=True)
            if response.status == 416 and part is not None and part.total == 0:
                return cls(0, response.validator, is_strong, accepts_ranges=False)
            if response.status == 200:
                return cls(response.length, response.validator, is_strong, accepts_ranges=False)
            raise TransientError(f"status {response.status} without a valid Content-Range")
