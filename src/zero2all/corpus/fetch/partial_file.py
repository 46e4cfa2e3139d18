"""A file that has arrived in part: its bytes at their places, and a journal of the ranges that are safely on disk."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from zero2all.corpus.fetch.remote_file import RemoteFile
from zero2all.errors import Z2aError
from zero2all.io import write_text
from zero2all.records import decode_json, parse_record


@dataclass(frozen=True, order=True)
class ByteRange:
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class JournalHeader:
    """The first line of a journal: bytes of another version of the file are never mixed with these."""

    path: str
    size: int
    identity: str


class PartialFile:
    """Two files in the work directory. Their names are hashes, since the name of the file may be of any length."""

    SAVE_BYTES = 4 << 20
    """A range is noted after each of them, so no more is lost in a crash. Smaller files have no journal."""

    def __init__(self, file: RemoteFile, work: Path) -> None:
        stem = hashlib.sha256(file.path.encode()).hexdigest()[:32]
        self.data_path, self.journal_path = work / f"{stem}.partial", work / f"{stem}.journal"
        self._header: JournalHeader | None = None  # without one, nothing can be continued later
        if file.size is not None and file.size > self.SAVE_BYTES and file.identity is not None and file.can_combine:
            self._header = JournalHeader(file.path, file.size, file.identity)
        self._data: FileIO | None = None
        self._journal: FileIO | None = None

    def read_ranges(self) -> list[ByteRange]:
        """The ranges on disk, merged; none if they are of another version, or if it is not known of which."""
        try:
            lines = self.journal_path.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be incomplete
            available = self.data_path.stat().st_size
            header = parse_record(JournalHeader, decode_json(lines[0]), self.journal_path)
            ranges = [ByteRange(*map(int, line.split())) for line in lines[1:]]
        except (OSError, ValueError, TypeError, IndexError, Z2aError):
            return []
        limit = min(available, header.size)
        if header != self._header or any(not 0 <= one.start < one.stop <= limit for one in ranges):
            return []
        return merge_ranges(ranges)

    def open(self) -> list[ByteRange]:
        """Continue what is there, or begin with nothing. Returns the ranges on disk."""
        ranges = self.read_ranges()
        if not ranges:
            self.remove()
        if self._header is not None:
            lines = [json.dumps(asdict(self._header)), *(f"{one.start} {one.stop}" for one in ranges)]
            write_text(self.journal_path, "\n".join(lines) + "\n")
            self._journal = FileIO(self.journal_path, "ab")
        self._data = FileIO(self.data_path, "r+" if ranges else "x+")
        return ranges

    def write(self, position: int, block: bytes) -> None:
        assert self._data is not None
        view = memoryview(block)
        while view:
            written = os.pwrite(self._data.fileno(), view, position)
            position, view = position + written, view[written:]

    def save(self, start: int, stop: int) -> None:
        """Note in the journal that a range was written. The range is on disk first, even if the power fails."""
        if stop > start and self._data is not None and self._journal is not None:
            os.fdatasync(self._data.fileno())
            self._journal.write(f"{start} {stop}\n".encode())  # in one call, so lines of threads are not mixed

    def truncate(self, size: int) -> None:
        assert self._data is not None
        os.ftruncate(self._data.fileno(), size)

    def move_to(self, target: Path) -> None:
        assert self._data is not None
        os.fdatasync(self._data.fileno())
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.data_path, target)
        self.remove()

    def close(self) -> None:
        """Only when no thread writes any more: another file might get the descriptor."""
        for stream in (self._data, self._journal):
            if stream is not None:
                stream.close()

    def remove(self) -> None:
        for path in (self.journal_path, self.data_path):  # never a journal without its data
            path.unlink(missing_ok=True)


def merge_ranges(ranges: list[ByteRange]) -> list[ByteRange]:
    """
    >>> merge_ranges([ByteRange(4, 9), ByteRange(0, 5), ByteRange(20, 30)])
    [ByteRange(start=0, stop=9), ByteRange(start=20, stop=30)]
    """
    merged: list[ByteRange] = []
    for one in sorted(ranges):
        if merged and one.start <= merged[-1].stop:
            merged[-1] = ByteRange(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return merged


def missing_ranges(present: list[ByteRange], size: int, step: int) -> list[ByteRange]:
    """What is missing of a file, in ranges of at most ``step`` bytes.

    >>> missing_ranges([ByteRange(4, 6)], size=12, step=4)
    [ByteRange(start=0, stop=4), ByteRange(start=6, stop=10), ByteRange(start=10, stop=12)]
    """
    bounds = [0, *(bound for one in present for bound in (one.start, one.stop)), size]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    return [
        ByteRange(start, min(start + step, last)) for first, last in gaps for start in range(first, last, max(1, step))
    ]
