"""Writes the shards of all ranks as a DCP checkpoint, without planning on rank 0.

DCP gathers the plans of all ranks on rank 0, in Python, at every save: minutes at a thousand ranks, while training
waits for the same interpreter. Here rank 0 gets one hash for each shard, once for a layout, and each rank one bit for
each of its own: which of the tensors that several ranks hold does it write?

Each rank writes its file and keeps the index of the chunks in it. Rank 0 merges these into ``chunks.parquet`` and
``.metadata``, and only when they have changed: the next checkpoints of a run have chunks at the same places.

With ``.metadata`` any tool of torch reads the checkpoint. Its millions of Python objects take tens of seconds at a
thousand ranks. Then it is made in another process (``python -m zero2all.checkpoint.dcp_writer``), so that training
keeps the interpreter to itself.
"""

from __future__ import annotations

import gc
import hashlib
import operator
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zero2all.base.errors import Z2aError
from zero2all.base.io import sha256_file
from zero2all.base.processes import end_with_parent
from zero2all.checkpoint.chunk_index import INDEX_FILE, ChunkIndex
from zero2all.checkpoint.rank_group import RankGroup

KEY_DTYPE: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<i8")])
Keys = NDArray[Any]  # of KEY_DTYPE


class SavePlanCache:
    """The write items of this rank, planned again only when the shards of a rank have changed."""

    def __init__(self) -> None:
        self._keys: Keys | None = None
        self._chosen: NDArray[np.bool_] = np.zeros(0, bool)

    def write_items(self, shards: dict[str, Tensor], rank_group: RankGroup) -> list[WriteItem]:
        """The shards that this rank writes. Called on all ranks."""
        items = [
            item
            for item in create_default_local_save_plan(shards, is_coordinator=True).items
            if not _is_empty_shard(item)
        ]
        keys = shard_keys(items)
        is_known = self._keys is not None and np.array_equal(self._keys, keys)
        if not rank_group.reduce(lambda: is_known, operator.and_):
            self._chosen = np.unpackbits(
                np.frombuffer(rank_group.scatter(keys.tobytes, _pack_writers), np.uint8), count=len(keys)
            ).astype(bool)
            self._keys = keys
        return [item for item, is_chosen in zip(items, self._chosen, strict=True) if is_chosen]


def _is_empty_shard(item: WriteItem) -> bool:
    """Return whether a rank has no part of a tensor: an empty shard may have the offsets of another shard."""
    assert item.tensor_data is not None
    return 0 in item.tensor_data.chunk.sizes and 0 not in item.tensor_data.size


def shard_keys(items: Sequence[WriteItem]) -> Keys:
    """The key of each shard, and its size. A key is a hash of 128 bits: no two shards of a run have the same."""
    keys = np.zeros(len(items), KEY_DTYPE)
    for number, item in enumerate(items):
        text = f"{item.index.fqn}\0{tuple(item.index.offset or ())}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        keys[number] = (*np.frombuffer(digest, "<u8"), item.tensor_storage_size() or 0)
    return keys


def assign_writers(keys: Sequence[Keys]) -> list[NDArray[np.bool_]]:
    """The shards that every rank writes: each shard once, and replicas evenly by bytes."""
    rank = np.repeat(np.arange(len(keys)), [len(of_rank) for of_rank in keys])
    everything = np.concatenate(keys)
    order = np.lexsort((rank, everything["low"], everything["high"]))
    high, low = everything["high"][order], everything["low"][order]
    is_first = np.concatenate([[True], (high[1:] != high[:-1]) | (low[1:] != low[:-1])])[: len(order)]
    starts = np.flatnonzero(is_first)
    copies = np.diff(starts, append=len(order))
    holders = np.add.reduceat(_mix(rank[order]), starts) if len(starts) else starts
    # Shards that the same ranks hold are dealt out in turn, the largest first; back and forth, so that nobody has the
    # larger one of every round.
    dealt = np.lexsort((low[starts], -everything["bytes"][order][starts], holders, copies))
    is_new = np.concatenate([[True], (np.diff(holders[dealt]) != 0) | (np.diff(copies[dealt]) != 0)])[: len(dealt)]
    first = np.flatnonzero(is_new)
    turn = np.arange(len(dealt)) - np.repeat(first, np.diff(first, append=len(dealt)))
    count = copies[dealt]
    forward, position = (turn // count) % 2 == 0, turn % count
    chosen = np.zeros(len(order), bool)
    chosen[order[starts[dealt] + np.where(forward, position, count - 1 - position)]] = True
    return np.split(chosen, np.cumsum([len(of_rank) for of_rank in keys])[:-1])


def _pack_writers(keys: Sequence[bytes]) -> list[bytes]:
    """``assign_writers`` in bits: all that a rank gets."""
    return [np.packbits(chosen).tobytes() for chosen in assign_writers([np.frombuffer(one, KEY_DTYPE) for one in keys])]


def _mix(rank: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each rank: their sum stands for the set of ranks. Equal sums of other sets cost balance only."""
    mixed = (rank.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class _SharedFiles:
    """The files that rank 0 writes beside the shards, compressed: the same for every checkpoint of a layout."""

    metadata: bytes
    index: bytes


class CheckpointWriter:
    """Writes the checkpoints of a run, and keeps the plan from one to the next.

    >>> files = CheckpointWriter().write(directory, shards, rank_group)
    """

    def __init__(self) -> None:
        self._plan = SavePlanCache()
        self._sent: bytes | None = None  # the index of this rank that rank 0 has
        self._indexes: list[bytes] = []  # of all ranks, on rank 0
        self._shared: _SharedFiles | None = None

    def write(
        self,
        place: Path,
        shards: dict[str, Tensor],
        rank_group: RankGroup,
        to_error: Callable[[Exception], Exception] = lambda error: error,
    ) -> list[Path]:
        """The files that this rank wrote. Called on all ranks; ``to_error`` explains a failed write."""
        plan = self._plan.write_items(shards, rank_group)
        files: list[Path] = []

        mine = b""

        def write_shards() -> bool:
            """Return whether rank 0 knows the index of the written files."""
            nonlocal mine
            try:
                index = _write_shards(place, shards, SavePlan(plan), rank_group.rank)
            except Exception as error:  # torch raises whatever it comes across
                raise to_error(error) from error
            files.extend(place / name for name in index.header.files)
            mine = zlib.compress(index.to_bytes(), 1)
            return mine == self._sent

        if not rank_group.reduce(write_shards, operator.and_):
            self._indexes = rank_group.scatter(lambda: mine, lambda parts: [parts, *[[]] * (len(parts) - 1)])
            self._sent, self._shared = mine, None
        if rank_group.rank == 0:
            files.extend([place / ".metadata", place / INDEX_FILE])

        def write_shared() -> None:
            try:
                self._write_shared(place)
            except OSError as error:
                raise to_error(error) from error

        rank_group.on_rank0(write_shared)
        return files

    def _write_shared(self, place: Path) -> None:
        metadata = place / ".metadata"
        if self._shared is None:
            index = ChunkIndex.merge([ChunkIndex.from_bytes(zlib.decompress(part)) for part in self._indexes])
            write_dcp_metadata(index, metadata)
            data = index.to_bytes(sha256_file(metadata))
            self._shared = _SharedFiles(zlib.compress(metadata.read_bytes(), 1), data)
        else:
            _write_synced(metadata, zlib.decompress(self._shared.metadata))
        _write_synced(place / INDEX_FILE, self._shared.index)


def _write_shards(place: Path, shards: dict[str, Tensor], plan: SavePlan, rank: int) -> ChunkIndex:
    """The index of the chunks that were written."""
    if not plan.items:
        return ChunkIndex.from_results([], [])
    planner, writer = DefaultSavePlanner(), FileSystemWriter(place)
    planner.set_up_planner(shards)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)  # files are named by the rank
    results = writer.write_data(writer.prepare_local_plan(plan), planner).wait()
    return ChunkIndex.from_results(plan.items, results)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


MAX_CHUNKS_IN_PROCESS = 20_000  # a fraction of a second
NICENESS = 10


def write_dcp_metadata(index: ChunkIndex, target: Path) -> None:
    """Write and sync ``.metadata``."""
    if len(index) <= MAX_CHUNKS_IN_PROCESS:
        _write(index, target)
        return
    command = [sys.executable, "-m", "zero2all.checkpoint.dcp_writer", str(target)]
    done = subprocess.run(command, input=index.to_bytes(), capture_output=True)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Z2aError(f"{target} cannot be written: {reason or f'the process ended with code {done.returncode}'}")


def _write(index: ChunkIndex, target: Path) -> None:
    with open(target, "wb") as stream:
        pickle.dump(index.metadata(), stream)
        stream.flush()
        os.fsync(stream.fileno())


def main() -> None:
    end_with_parent()
    os.nice(NICENESS)
    gc.disable()  # millions of objects, none of them in a cycle
    failed = False
    try:
        _write(ChunkIndex.from_bytes(sys.stdin.buffer.read()), Path(sys.argv[1]))
    except Exception as error:
        sys.stderr.write(f"{error}\n")
        failed = True
    # The file is written and synced. Threads of torch's libraries sometimes abort the interpreter's own exit.
    os._exit(failed)


if __name__ == "__main__":
    main()
