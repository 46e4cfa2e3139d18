"""Time to load a checkpoint, against reading the same bytes from the same disk.

    python -m benchmarks checkpoint_load --work /tmp/load --gib 3

Writes a checkpoint of that size once, on one rank and on two, and then loads it and reads it, in processes of their own
and with a cold page cache (its pages are dropped with posix_fadvise) as well as a warm one. Lines: seconds of the
load, of reading the files in blocks of 8 MiB, and their ratio; the slower rank counts. Verification of checksums, which
a restart does at the same time if there is an older checkpoint, is a column of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.common import benchmark_parser, show_json, wall_seconds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from zero2all.bench.checkpoint import blank_training_state
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint import CheckpointStore, RankGroup
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE

ROWS = 4096


def shards(gib: float) -> dict[str, torch.Tensor]:
    """fp32 matrices of 64 MiB, split over the ranks by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = ROWS // dist.get_world_size()
    return {
        f"model.layers.{number}.weight": DTensor.from_local(torch.rand(local, ROWS), mesh, [Shard(0)])
        for number in range(int(gib * 16))
    }


def write(directory: Path, gib: float) -> float:
    return wall_seconds(
        CheckpointStore(directory).write, 1, shards(gib), blank_training_state(), UNKNOWN_LINEAGE, RankGroup()
    )


def drop_pages(directory: Path) -> None:
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(directory: Path, is_cold: bool, group: RankGroup, function: Callable[[], object]) -> float:
    if is_cold:
        group.on_rank0(lambda: drop_pages(directory / "step-00000001"))
    begin = time.perf_counter()
    function()
    return group.reduce(lambda: time.perf_counter() - begin, max)


def measure(directory: Path, gib: float) -> list[dict[str, object]]:
    checkpoints, group = CheckpointStore(directory), RankGroup()
    tensors = shards(gib)
    step, rank_slice = checkpoints.path(1), (group.rank, group.world_size)
    own, buffer = step / f"__{group.rank}_0.distcp", bytearray(8 << 20)

    def read() -> None:
        with open(own, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass

    lines: list[dict[str, object]] = []
    for cache in ("cold", "warm"):
        is_cold = cache == "cold"
        plain = timed(directory, is_cold, group, read)
        load = timed(directory, is_cold, group, lambda: checkpoints.reader(1).load(tensors))
        check = timed(directory, is_cold, group, lambda: checkpoints.verify(1, rank_slice))
        seconds = {"read": round(plain, 2), "load": round(load, 2), "verify": round(check, 2)}
        lines.append({"ranks": group.world_size, "cache": cache, **seconds, "ratio": round(load / plain, 2)})
    return lines


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=3.0)
    options = parser.parse_args()
    for ranks in (1, 2):
        directory = options.work / str(ranks)
        written = run_ranks(ranks, write, directory, options.gib, seconds=900)
        show_json({"ranks": ranks, "gib": options.gib, "write": round(max(written), 2)})
        for line in run_ranks(ranks, measure, directory, options.gib, seconds=900)[0]:
            show_json(line)
