"""``z2a corpus fetch``: list the files, find out which are missing, download those."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zero2all.base.console import progress, say
from zero2all.base.directory_lock import LockUser, lock_directory
from zero2all.base.errors import UsageError, Z2aError, is_disk_full
from zero2all.base.io import disk_full_error
from zero2all.base.network.http_client import HttpClient
from zero2all.base.paths import RemotePath
from zero2all.base.units import show_bytes
from zero2all.corpus.fetch.download import ChangedError, Download, DownloadContext, PartialFile, run_all
from zero2all.corpus.fetch.remote_file import (
    WORK_DIRECTORY,
    FetchedFile,
    FetchRecord,
    FileDigests,
    RemoteFile,
    check_paths,
    is_in_hidden_directory,
    probe_file,
)
from zero2all.corpus.fetch.sources import FetchOptions, list_selected, parse_source, recipe_sources
from zero2all.recipe import SourceRecipe

UNKNOWN_SIZE_LIMIT = 10 * 10**9  # of files whose size the server does not say
MAX_FAILED_FILES = 10  # after which the rest is not tried
MAX_VERSIONS = 4  # of a file that changes during its download
LOCK_PATIENCE = 0.0  # seconds


@dataclass(frozen=True)
class FetchResult:
    to: str
    files: int
    bytes: int
    downloaded_files: int
    """The number of files that were not there already."""
    downloaded_bytes: int
    seconds: float
    sources: list[SourceRecipe]
    """For the recipe of a corpus."""


def list_files(sources: list[str], options: FetchOptions) -> list[RemoteFile]:
    """The files that would be downloaded."""
    return _list_files(sources, options, options.client(), threading.Event())


def fetch_files(sources: list[str], to: Path, options: FetchOptions) -> FetchResult:
    """Download all files of the sources into a directory. What is there already is not downloaded again."""
    if isinstance(to, RemotePath):
        raise UsageError(f"{to}: the directory of a download must be on this machine")
    began, client, stop = time.monotonic(), options.client(), threading.Event()
    files = _list_files(sources, options, client, stop)
    work = to / WORK_DIRECTORY
    with lock_directory(work, LockUser("download", to, "--to DIR"), LOCK_PATIENCE):
        record = FetchRecord(to, work)
        missing = [file for file in files if not _is_present(file, to, record)]
        remaining = _remaining_bytes(missing, work)
        _check_space(to, remaining)
        try:
            if missing:
                _FetchRun(to, record, options, client, stop).run(missing, remaining)
        except OSError as error:
            if is_disk_full(error):
                raise disk_full_error(to, error) from error
            raise
        finally:
            record.write()
    paths = {file.path for file in missing}
    return FetchResult(
        to=str(to),
        files=len(files),
        bytes=sum(record.files[file.path].size for file in files),
        downloaded_files=len(missing),
        downloaded_bytes=sum(record.files[path].size for path in paths),
        seconds=time.monotonic() - began,
        sources=recipe_sources(sources, files, to),
    )


def _list_files(
    sources: list[str], options: FetchOptions, client: HttpClient, stop: threading.Event
) -> list[RemoteFile]:
    with progress("listing files"):
        files = list_selected([parse_source(text) for text in sources], options, client, stop)
    check_paths([file.path for file in files])
    hidden = [file.path for file in files if is_in_hidden_directory(file.path)]
    if hidden:
        say(f"{len(hidden)} files in hidden directories are left out: {', '.join(hidden[:3])[:200]}")
        files = [file for file in files if not is_in_hidden_directory(file.path)]
        if not files:
            raise UsageError("all selected files are in hidden directories, which are never downloaded")
    for file in files:
        _check_size(file, options.max_size)
    return files if options.sha256 is None else [_with_checksum(files, options.sha256)]


def _check_size(file: RemoteFile, limit: int | None) -> None:
    if limit is not None and file.size is not None and file.size > limit:
        raise UsageError(
            f"{file.path} has {show_bytes(file.size)}, more than {show_bytes(limit)}: leave it out with --exclude, "
            "or raise --max-size"
        )


def _with_checksum(files: list[RemoteFile], sha256: str) -> RemoteFile:
    if len(files) != 1:
        raise UsageError(f"--sha256 is for one file, and there are {len(files)}")
    [file] = files
    wanted = f"sha256:{sha256.lower()}"
    if file.validator is not None and file.validator.startswith("sha256:") and file.validator != wanted:
        raise Z2aError(f"{file.path}: the Hub lists {file.validator}, not {wanted}: nothing was downloaded")
    return replace(file, validator=wanted)


def _is_present(file: RemoteFile, to: Path, record: FetchRecord) -> bool:
    """Whether a file need not be downloaded. What somebody else wrote, or changed, is not overwritten."""
    target = to / file.path
    if not target.parent.resolve().is_relative_to(to.resolve()):
        raise UsageError(f"{target.parent} leads out of {to}, through a link: remove the link, or use another --to")
    if not target.exists():
        return False
    known = record.files.get(file.path)
    if known is None:
        return _adopt(file, target, record)
    if known.source != file.source:
        raise UsageError(f"{target} is from {known.source}: use another --to for {file.source}")
    if not known.is_intact(target):
        raise UsageError(
            f"{target} was changed after its download: remove it to download it again, or use another --to"
        )
    return known.is_version_of(file)


def _adopt(file: RemoteFile, target: Path, record: FetchRecord) -> bool:
    """Take over a file that another program downloaded, if its checksum proves it."""
    if file.has_checksum and target.is_file():
        digests = FileDigests.of(target, with_git=file.has_git_checksum)
        if not file.checksum_problem(digests):
            record.add(FetchedFile.of(file, target, digests.sha256))
            return True
    raise UsageError(f"{target} exists and is not from this command: remove it, or use another --to")


def _remaining_bytes(files: list[RemoteFile], work: Path) -> int:
    """Bytes that are not in partial files yet."""
    return sum((file.size or 0) - PartialFile(file, work).present for file in files)


def _check_space(to: Path, needed: int) -> None:
    if needed > shutil.disk_usage(to).free:
        raise disk_full_error(to, OSError(errno.ENOSPC, "No space left on device"), needed)


class _FetchRun:
    """The downloads of one command."""

    def __init__(
        self, to: Path, record: FetchRecord, options: FetchOptions, client: HttpClient, stop: threading.Event
    ) -> None:
        self._to, self._record, self._options = to, record, options
        self._context = DownloadContext(client, stop, self._advance, options.max_size or UNKNOWN_SIZE_LIMIT)
        self._show_progress: Callable[[float], None] = lambda amount: None
        self._lock = threading.Lock()
        self._failures: dict[str, Z2aError] = {}
        self._not_tried = 0

    def run(self, files: list[RemoteFile], remaining: int) -> None:
        title = f"downloading {len(files)} files, {show_bytes(remaining)}"
        with progress(title, remaining or None, is_transfer=True) as self._show_progress:
            run_all([partial(self._fetch, file) for file in files], self._options.workers, self._context.stop)
        if self._failures:
            raise self._error(len(files))

    def _advance(self, amount: float) -> None:
        with self._lock:
            self._show_progress(amount)

    def _fetch(self, file: RemoteFile) -> None:
        if len(self._failures) >= MAX_FAILED_FILES:
            self._not_tried += 1
            return
        try:
            download, fetched = self._download(file)
        except Z2aError as error:
            self._failures[file.path] = error
            return
        # Before it is in place: a file that is in place without an entry would look like somebody else's.
        self._record.add(fetched)
        download.place(self._to / fetched.path)

    def _download(self, file: RemoteFile) -> tuple[Download, FetchedFile]:
        """A file that changes meanwhile is downloaded again, in the version that the server has then."""
        for version in range(1, MAX_VERSIONS + 1):
            download = Download(file, self._to / WORK_DIRECTORY, self._context)
            try:
                return download, download.run()
            except ChangedError:
                if version == MAX_VERSIONS:
                    raise
                file = probe_file(self._context.client, self._context.stop, file.source, file.url, file.path)
                _check_size(file, self._options.max_size)
        raise AssertionError("the last version returns or raises")

    def _error(self, count: int) -> Z2aError:
        lines = [f"  - {error}" for error in self._failures.values()]
        head = f"{len(self._failures)} of {count} files could not be downloaded"
        rest = f", {self._not_tried} were not tried" if self._not_tried else ""
        return Z2aError("\n".join([f"{head}{rest}. What has arrived is kept: run the same command again.", *lines]))
