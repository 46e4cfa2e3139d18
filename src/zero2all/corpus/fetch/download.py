"""The download of one file: in parallel ranges, where the server gives them, until every byte is there and verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from zero2all.corpus.fetch.fetch_manifest import FetchedFile
from zero2all.corpus.fetch.http_client import FetchError, HttpClient, HttpOrigin, Response, TransientError
from zero2all.corpus.fetch.partial_file import ByteRange, PartialFile, missing_ranges
from zero2all.corpus.fetch.remote_file import FileDigests, ProbedUrl, RemoteFile
from zero2all.corpus.fetch.retry import Backoff, Stopped
from zero2all.units import show_bytes

BLOCK_BYTES = 1 << 18
MIN_PROGRESS = 64 << 10  # bytes; a request that brought fewer counts as a failure
MIN_RANGE_BYTES = 16 << 20
MAX_RANGE_BYTES = 256 << 20
RANGES_PER_WORKER = 4  # of the largest file, so that no worker is alone with the end of it


class ChangedError(FetchError):
    """The server has a different version of the file, or does not say which one it has sent."""


@dataclass(frozen=True)
class DownloadContext:
    """What all downloads of a command share."""

    client: HttpClient
    stop: threading.Event
    advance: Callable[[float], None]
    """Reports bytes that arrived; a negative number, bytes that were discarded."""
    workers: int
    unknown_size_limit: int
    """For files whose size the server does not say."""


class Download:
    """One file on its way to disk. Threads may fetch its ranges at the same time."""

    def __init__(self, file: RemoteFile, work: Path, context: DownloadContext) -> None:
        self.file, self.context = file, context
        self.partial = PartialFile(file, work)
        self._accepts_ranges = bool(file.accepts_ranges)
        self._direct: tuple[str, bool] | None = None  # where the last redirect led to, and whether it may be private

    def open(self) -> list[ByteRange]:
        """The ranges to fetch. Of a file of unknown size it is one that is too long."""
        file, present = self.file, self.partial.open()
        if file.size is None:
            return [ByteRange(0, self.context.unknown_size_limit + 1)]
        if file.accepts_ranges is None and file.size > MIN_RANGE_BYTES:
            self._accepts_ranges = ProbedUrl.of(self.context.client, file.url, self.context.stop).accepts_ranges
        share = file.size // (self.context.workers * RANGES_PER_WORKER)
        in_ranges = self._accepts_ranges and file.can_combine
        step = max(MIN_RANGE_BYTES, min(MAX_RANGE_BYTES, share)) if in_ranges else file.size
        return missing_ranges(present, file.size, step)

    def fetch(self, part: ByteRange) -> None:
        """Fetch a range, with as many requests as it takes."""
        position = saved = part.start
        backoff = Backoff(self.file.path, self.context.stop)
        try:
            while True:
                began = position
                try:
                    with closing(self._receive(position, part.stop)) as blocks:
                        for block in blocks:
                            self.partial.write(position, block)
                            position += len(block)
                            self.context.advance(len(block))
                            if position - saved >= self.partial.SAVE_BYTES:
                                self.partial.save(saved, position)
                                saved = position
                    break
                except TransientError as error:
                    can_continue = self.file.size is not None and self.file.can_combine
                    # Without that, the next answer may be a different text: nothing has been gained.
                    backoff.wait(error, can_continue and position - began >= MIN_PROGRESS)
                    if not can_continue:
                        self.context.advance(-position)
                        position = saved = 0
        finally:
            self.partial.save(saved, position)
        if self.file.size is None:
            self.partial.truncate(position)

    def finish(self) -> FetchedFile:
        """Verify the file. One with a wrong checksum is removed."""
        digests = FileDigests.of(self.partial.data_path, self.file.has_git_checksum)
        if problem := self.file.checksum_problem(digests):
            self.partial.remove()
            raise FetchError(f"{self.file.path}: {problem}: the file was refused and removed")
        return FetchedFile.of(self.file, self.partial.data_path, digests.sha256)

    def place(self, target: Path) -> None:
        self.partial.move_to(target)
        self.partial.close()

    def abandon(self) -> None:
        """Keep what the next command can continue. Only when no thread fetches a range any more."""
        self.partial.close()
        if not self.partial.read_ranges():
            self.partial.remove()

    def discard(self) -> None:
        """Keep nothing. Only when no thread fetches a range any more."""
        self.partial.close()
        self.partial.remove()

    def _receive(self, start: int, stop: int) -> Generator[bytes]:
        """The bytes from start to stop. Raises TransientError if fewer arrive; more are not read."""
        size = self.file.size
        headers = {} if start == 0 and (size is None or stop == size) else {"Range": f"bytes={start}-{stop - 1}"}
        if headers and self.file.http_validator is not None:
            headers["If-Range"] = self.file.http_validator
        with self._get(headers) as response:
            position = self._first_byte(response, start)
            while position < stop:
                if self.context.stop.is_set():
                    raise Stopped
                block = response.read(min(BLOCK_BYTES, stop - position))
                if not block:
                    break
                position += len(block)
                if position > start:
                    yield block[-(position - start) :]  # without bytes that are here already
        if size is None:
            self._check_unknown_size(position)
        elif position < stop:
            raise TransientError(f"the connection ended {show_bytes(stop - position)} too early")

    def _check_unknown_size(self, received: int) -> None:
        limit = self.context.unknown_size_limit
        if received > limit:
            raise FetchError(
                f"{self.file.path}: the server does not say its size, and it is larger than {show_bytes(limit)}: "
                "raise --max-size if that is right"
            )

    def _get(self, headers: dict[str, str]) -> Response:
        """From where the last redirect led to, if that is another server: the Hub limits the number of requests."""
        direct, may_be_private = self._direct or (None, None)
        try:
            response = self.context.client.get(direct or self.file.url, headers, may_be_private)
        except FetchError as error:
            if direct is None:
                raise
            self._direct = None  # such URLs expire
            raise TransientError(f"the server refused a URL that it gave before (status {error.status})") from error
        except TransientError:
            self._direct = None
            raise
        if HttpOrigin.of(response.url) != HttpOrigin.of(self.file.url):
            self._direct = response.url, response.may_be_private
        return response

    def _first_byte(self, response: Response, start: int) -> int:
        """The position of the first byte in the response, which is the one asked for or, without ranges, 0."""
        file = self.file
        if response.status not in (200, 206):
            raise TransientError(f"status {response.status} in answer to a download")
        if file.http_validator is not None and response.validator != file.validator:
            raise ChangedError(f"{file.path} has changed on the server: run the same command again to start over")
        if response.status == 206:
            part = response.content_range
            if part is None or part.start != start or part.total not in (None, file.size):
                shown = response.headers.get("Content-Range", "none")[:80]
                raise TransientError(f"the server sent the wrong part (Content-Range: {shown})")
            return start
        if start > 0 and self._accepts_ranges:
            raise TransientError("the server sent the whole file instead of a range")
        if file.size is not None and response.length not in (None, file.size):
            raise TransientError(f"the server sends {response.length} bytes, not {file.size}")
        return 0
