"""A shuffle through files: each shard writes one file of rows sorted by hash, each partition reads its range of all.

A partition is a range of hashes, so it is a slice of every file, found by bisection: there is one file for a shard and
not one for each shard and partition, and the reader chooses the number of partitions, not the writer. ``DedupParams``
says how many there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from zero2all.base.errors import Z2aError
from zero2all.base.io import atomic_path
from zero2all.base.paths import RemotePath, arrow_source
from zero2all.corpus.document import is_labeled_as_code

Rows = NDArray[Any]  # a structured array; its fields are named where it is made
Key = int | bytes  # a hash, or a gid

# The 16 bytes of a gid, most significant first: they sort as the hexadecimal text does.
GID_DTYPE = "S16"
READ_ROWS = 1024
REMOTE_BLOCK_BYTES = 1 << 20  # read of a remote file at once
SHINGLE_CHARACTERS = 2**16  # split into units at once: the arrays then stay in the processor's cache


def gids_to_bytes(texts: Sequence[str]) -> NDArray[np.bytes_]:
    if any(len(text) != 32 for text in texts):
        raise Z2aError("a gid is not 32 hexadecimal digits: build the documents again")
    return np.frombuffer(bytes.fromhex("".join(texts)), dtype=GID_DTYPE)


def gids_to_hex(gids: NDArray[np.bytes_]) -> list[str]:
    data = np.ascontiguousarray(gids).tobytes().hex()  # tolist() would lose zero bytes at the end
    return [data[start : start + 32] for start in range(0, len(data), 32)]


def save_rows(target: Path, rows: Rows) -> None:
    with atomic_path(target) as partial, open(partial, "wb") as stream:
        np.save(stream, rows, allow_pickle=False)


def load_rows(path: Path) -> Rows:
    """A view of the file; of one on a local disk, what is not touched is not read."""
    if isinstance(path, RemotePath):
        return np.load(BytesIO(path.read_bytes()), allow_pickle=False)  # type: ignore[no-any-return]
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except ValueError:  # an empty array cannot be mapped
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def save_sorted(target: Path, rows: Rows, *fields: str) -> None:
    save_rows(target, rows[argsort_by(rows, *fields)])


def argsort_by(rows: Rows, *fields: str) -> NDArray[np.intp]:
    """The order by the first field, then the second, and so on."""
    return np.lexsort(tuple(rows[field] for field in reversed(fields)))


def read_partition(files: Sequence[Path], partition: int, partitions: int, field: str = "hash") -> Rows:
    """All rows of the files whose ``field``, a hash or a gid, lies in the partition's range. They are sorted by it."""
    first = -(-(partition << 64) // partitions)
    last = -(-((partition + 1) << 64) // partitions) - 1
    bounds: tuple[Key, Key] = (first, last)
    if field != "hash":  # a gid: its first bytes are as good as a hash
        bounds = (first.to_bytes(8, "big") + bytes(8), last.to_bytes(8, "big") + b"\xff" * 8)
    if any(isinstance(path, RemotePath) for path in files):
        return np.concatenate([rows_between(path, field, *bounds) for path in files])
    # One copy into its place: a list of copies to concatenate would take the memory twice. Files are opened one at a
    # time: there may be more of them than a process may have open.
    ranges = [_range_between(load_rows(path), field, *bounds) for path in files]
    rows = np.empty(sum(stop - start for start, stop in ranges), load_rows(files[0]).dtype)
    at = 0
    for path, (start, stop) in zip(files, ranges, strict=True):
        rows[at : at + stop - start] = load_rows(path)[start:stop]
        at += stop - start
    return rows


def rows_between(path: Path, field: str, first: Key, last: Key) -> Rows:
    """The rows whose ``field`` is from first to last. The file is sorted by it, so only they are read."""
    if isinstance(path, RemotePath):
        return _remote_rows_between(path, field, first, last)
    rows = load_rows(path)
    start, stop = _range_between(rows, field, first, last)
    return np.array(rows[start:stop])


def _range_between(rows: Rows, field: str, first: Key, last: Key) -> tuple[int, int]:
    kind = rows.dtype[field].type
    start = np.searchsorted(rows[field], kind(first), side="left")
    stop = np.searchsorted(rows[field], kind(last), side="right")
    return int(start), int(stop)


def _remote_rows_between(path: RemotePath, field: str, first: Key, last: Key) -> Rows:
    """The same by bisection over blocks: a small file is one request, a large one some ten."""

    @cache
    def block(number: int) -> bytes:
        return path.read_range(number * REMOTE_BLOCK_BYTES, (number + 1) * REMOTE_BLOCK_BYTES)

    def rows(start: int, stop: int) -> Rows:
        begin, end = top + start * kind.itemsize, top + stop * kind.itemsize
        one = begin // REMOTE_BLOCK_BYTES
        data = b"".join(block(number) for number in range(one, -(-end // REMOTE_BLOCK_BYTES)))
        return np.frombuffer(data, kind, stop - start, begin - one * REMOTE_BLOCK_BYTES) if stop > start else none

    def value(number: int) -> Key:
        found = rows(number, number + 1)[field][0]
        return found.ljust(16, b"\0") if isinstance(found, bytes) else int(found)  # zero bytes at the end are lost

    head = BytesIO(block(0))
    np.lib.format.read_magic(head)
    (count,), _, kind = np.lib.format.read_array_header_1_0(head)
    top, none = head.tell(), np.zeros(0, kind)
    start = bisect_left(range(count), first, key=value)
    stop = bisect_right(range(count), last, lo=start, key=value)
    return rows(start, stop).copy()


def group_starts(values: NDArray[Any]) -> NDArray[np.intp]:
    """Where each run of equal values begins."""
    if len(values) == 0:
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def read_columns(shard: Path, columns: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """A shard's columns, some rows at a time."""
    with pq.ParquetFile(arrow_source(shard)) as file:
        for batch in file.iter_batches(READ_ROWS, columns=list(columns)):
            yield batch.to_pydict()


def split_by_characters(texts: Sequence[str], chosen: NDArray[np.intp], characters: int) -> Iterator[NDArray[np.intp]]:
    """The chosen texts by number, in groups of about ``characters`` characters."""
    if len(chosen) == 0:
        return
    sizes = np.cumsum([len(texts[place]) for place in chosen])
    yield from np.split(chosen, group_starts(sizes // characters)[1:])


LABEL_COLUMNS = ("gid", "data_src", "category", "title", "others")


def document_labels(columns: dict[str, list[str]], params: DedupParams) -> tuple[list[int], list[bool]]:
    """For each document its source priority, and whether it is code."""
    priorities = [params.get_priority(source) for source in columns["data_src"]]
    return priorities, list(map(is_labeled_as_code, columns["category"], columns["title"], columns["others"]))


SORT_COPIES = 4  # of its rows that a task holds at once: read, order and sorted copies
TASK_OVERHEAD_BYTES = 256 << 20  # the interpreter and its libraries


@dataclass(frozen=True)
class DedupParams:
    source_priority: tuple[str, ...] = ()
    """Sources, best first: of equal documents the one from the best source stays. Unnamed sources come last."""
    partitions: int = 16
    """Parts that a shuffle is split into, at least. There are more where a part would not fit into the memory."""
    task_bytes: int = 2 << 30
    """Memory that one task may take, about."""
    bands: int = 14
    rows_per_band: int = 8
    """Signature values in a band. 14 x 8 finds a pair at Jaccard 0.8 with probability 0.92, at 0.85 with 0.99."""
    ngram: int = 5
    min_shingles: int = 5
    """A document with fewer shingles is only compared exactly."""
    threshold: float = 0.8
    margin: float = 0.04
    """How far an estimate may lie below the threshold: one standard deviation of it, with 112 slots at Jaccard 0.8.
    A wider margin finds a few more pairs and drops more that are not similar: tests/corpus/test_dedup.py has both."""
    seed: int = 1

    def partitions_for(self, rows: int, row_bytes: int) -> int:
        """Into how many parts rows are split so that a task can sort one of them in memory."""
        needed = -(-rows * row_bytes * SORT_COPIES // max(1, self.task_bytes - TASK_OVERHEAD_BYTES))
        return max(self.partitions, needed)

    @property
    def slots(self) -> int:
        return self.bands * self.rows_per_band

    def get_priority(self, data_src: str) -> int:
        return self.source_priority.index(data_src) if data_src in self.source_priority else len(self.source_priority)
