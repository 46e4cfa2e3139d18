"""The download of one file, with as many requests as it takes until all of it is verified; of many files in threads."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import httpx2

from zero2all.base.network.http_client import Backoff, HttpClient, HttpError, Stopped, TransientError
from zero2all.base.units import show_bytes
from zero2all.corpus.fetch.remote_file import FetchedFile, FileDigests, RemoteFile, ResponseHeaders

MIN_PROGRESS = 64 << 10  # bytes; a request that brought fewer counts as a failure
STOP_SECONDS = 2.0  # for threads to note what has arrived when the command is interrupted


class ChangedError(HttpError):
    """The server has a different version of the file, or does not say which one it has sent."""


@dataclass(frozen=True)
class DownloadContext:
    """What all downloads of a command share."""

    client: HttpClient
    stop: threading.Event
    advance: Callable[[float], None]
    """Reports bytes that arrived; a negative number, bytes that were discarded."""
    unknown_size_limit: int
    """For files whose size the server does not say."""


class PartialFile:
    """The start of a file, in the work directory. A request appends to it, so its size says what is missing.

    File systems write data before the size that includes it, so this holds after a power failure, too. The name is made
    of hashes: bytes of different versions are never mixed, and the name of the file may be of any length.
    """

    def __init__(self, file: RemoteFile, work: Path) -> None:
        stem, version = (_short_hash(text) for text in (file.path, f"{file.identity} {file.size}"))
        self.path, self._can_resume, self._size = work / f"{stem}.{version}.partial", file.can_resume, file.size or 0
        self._others = f"{stem}.*.partial"

    @property
    def present(self) -> int:
        """Bytes that an earlier command has left."""
        try:
            size = self.path.stat().st_size if self._can_resume else 0
        except FileNotFoundError:
            return 0
        return size if size <= self._size else 0

    def open(self) -> BufferedWriter:
        for other in self.path.parent.glob(self._others):
            if other != self.path or not self.present:
                other.unlink()
        return open(self.path, "ab")

    def close(self, stream: BufferedWriter) -> None:
        """Keep only what the next command can continue."""
        stream.close()
        if not self.present:
            self.path.unlink(missing_ok=True)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Download:
    """One file on its way to disk."""

    def __init__(self, file: RemoteFile, work: Path, context: DownloadContext) -> None:
        self.file, self.context = file, context
        self.partial = PartialFile(file, work)

    def run(self) -> FetchedFile:
        """Download and verify the file, which is then in the work directory. One with a wrong checksum is removed."""
        stream = self.partial.open()
        try:
            self._receive_all(stream)
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            self.partial.close(stream)
            raise
        stream.close()
        digests = FileDigests.of(self.partial.path, with_git=self.file.has_git_checksum)
        if problem := self.file.checksum_problem(digests):
            self.partial.path.unlink()
            raise HttpError(f"{self.file.path}: {problem}: the file was rejected and removed")
        return FetchedFile.of(self.file, self.partial.path, digests.sha256)

    def place(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial.path, target)

    def _receive_all(self, stream: BufferedWriter) -> None:
        backoff, furthest = Backoff(self.file.path, self.context.stop), stream.tell()
        while True:
            try:
                self._receive(stream)
                return
            except TransientError as error:
                position = stream.tell()
                backoff.wait(error, has_progressed=position - furthest >= MIN_PROGRESS)
                furthest = max(furthest, position)
                if not self.file.can_resume:  # the next answer may be a different text
                    self._discard(stream)

    def _receive(self, stream: BufferedWriter) -> None:
        """What is missing, with one request. Raises TransientError if less arrives; more is not read."""
        size, limit = self.file.size, self.context.unknown_size_limit
        if size is not None and stream.tell() == size:
            return
        with closing(self.context.client.open(self.file.url, self._range_headers(stream.tell()))) as response:
            if not self._continues(response, stream.tell()):
                self._discard(stream)
            missing = (limit + 1 if size is None else size) - stream.tell()
            for block in response.iter_raw():
                if self.context.stop.is_set():
                    raise Stopped
                stream.write(block[:missing])
                self.context.advance(min(missing, len(block)))
                missing -= len(block)
                if missing <= 0:
                    break
        if size is not None and missing > 0:
            raise TransientError(f"the connection ended {show_bytes(missing)} too early")
        if size is None and missing <= 0:
            raise HttpError(
                f"{self.file.path}: the server does not say its size, and it is larger than {show_bytes(limit)}: "
                "raise --max-size if that is right"
            )

    def _range_headers(self, start: int) -> dict[str, str]:
        if start == 0:
            return {}
        validator = self.file.http_validator
        return {"Range": f"bytes={start}-", **({"If-Range": validator} if validator is not None else {})}

    def _continues(self, response: httpx2.Response, start: int) -> bool:
        """Whether the response starts at the byte asked for; without ranges, it starts at the first one."""
        file, headers = self.file, ResponseHeaders(response.headers)
        if response.status_code not in (200, 206):
            raise TransientError(f"status {response.status_code} in answer to a download")
        if file.http_validator is not None and headers.validator != file.validator:
            raise ChangedError(f"{file.path} has changed on the server: run the same command again to start over")
        if response.status_code == 206:
            part = headers.content_range
            if part is None or part.start != start or part.total not in (None, file.size):
                shown = response.headers.get("Content-Range", "none")[:80]
                raise TransientError(f"the server sent the wrong part (Content-Range: {shown})")
            return True
        if file.size is not None and headers.length not in (None, file.size):
            raise TransientError(f"the server sends {headers.length} bytes, not {file.size}")
        return False

    def _discard(self, stream: BufferedWriter) -> None:
        if arrived := stream.tell():
            self.context.advance(-arrived)
            stream.truncate(0)
            stream.seek(0)


def run_all(jobs: Iterable[Callable[[], None]], workers: int, stop: threading.Event) -> None:
    """Run all jobs. The first exception of a job sets ``stop`` and is raised, and so does Ctrl-C.

    A thread that is waiting for a server is then left behind, which no executor of the standard library does.
    """
    waiting, errors = deque(jobs), list[BaseException]()

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                job()
            except Stopped:
                return
            except BaseException as error:
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=work, name="z2a-fetch", daemon=True) for _ in range(min(workers, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and not stop.is_set():
                thread.join(0.1)
    except BaseException:
        stop.set()
        raise
    finally:
        deadline = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
