"""Writes the shards of all ranks as a DCP checkpoint, without planning on rank 0.

Each rank writes its file and keeps the index of the chunks in it. Rank 0 merges these into ``chunks.parquet`` and
``.metadata``, and only when they have changed: the next checkpoints of a run have chunks at the same places.
"""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from zero2all.checkpoint.chunk_index import INDEX_FILE, ChunkIndex
from zero2all.checkpoint.dcp_metadata import write_dcp_metadata
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.save_plan import SavePlanCache
from zero2all.io import sha256_file


@dataclass(frozen=True)
class _SharedFiles:
    """What rank 0 writes beside the shards, compressed: it is the same for every checkpoint of a layout."""

    metadata: bytes
    index: bytes


class CheckpointWriter:
    """Keeps the plan of a run's checkpoints.

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
            """Whether rank 0 knows the index of what was written."""
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
