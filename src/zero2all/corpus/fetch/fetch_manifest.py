"""``fetch.json``: which files of a directory were downloaded, and from where."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from zero2all import __version__
from zero2all.corpus.fetch.remote_file import MANIFEST_NAME, RemoteFile
from zero2all.errors import Z2aError
from zero2all.io import read_record, sha256_file, write_record
from zero2all.records import decode_json, parse_record
from zero2all.redact import redact


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
