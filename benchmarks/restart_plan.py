"""What one rank and rank 0 do to plan a save and a restart of a job of many ranks, without the data itself.

    python -m benchmarks restart_plan --ranks 1024 --tensors 2100

Every tensor is sharded over all ranks, so a checkpoint has ranks x tensors chunks. Each line is a step in a process of
its own, with its CPU seconds and peak resident memory. Once for a layout: what every rank does with the keys of all
ranks, and what rank 0 does with their indexes ("stall" is the longest time that another thread of rank 0 had to wait
for the interpreter meanwhile). At a restart: what each rank does to plan the reads of its part, from storage or from
slots in memory. With --dcp the same through ``.metadata`` alone, as a checkpoint without an index is read.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import threading
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import benchmark_parser, peak_bytes, run_child, show_json
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from zero2all.base.io import sha256_file, write_json
from zero2all.base.torch_private import storage_info
from zero2all.checkpoint.chunk_index import INDEX_FILE, ChunkIndex
from zero2all.checkpoint.dcp_reader import SlotReader, read_index, read_metadata
from zero2all.checkpoint.dcp_writer import KEY_DTYPE, assign_writers, shard_keys, write_dcp_metadata
from zero2all.checkpoint.slot_format import ShardSpec, SlotHeader
from zero2all.checkpoint.staged_slot import StagedSlot
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE

ROWS, COLUMNS = 32, 8192  # of a shard


def names(tensors: int) -> list[str]:
    return [
        f"optimizer.state.layers.{number // 27}.self_attn.q_proj.weight.exp_avg.{number}" for number in range(tensors)
    ]


def write_items(rank: int, ranks: int, tensors: int) -> list[WriteItem]:
    offsets, sizes = torch.Size([rank * ROWS, 0]), torch.Size([ROWS, COLUMNS])
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size([ranks * ROWS, COLUMNS])
    )
    return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data) for name in names(tensors)]


def rank_indexes(ranks: int, tensors: int) -> list[bytes]:
    """What the ranks send: that of the first as it is made from what was written, and the others like it."""
    items, size = write_items(0, ranks, tensors), ROWS * COLUMNS * 4 + 1000
    results = [
        WriteResult(item.index, size, storage_info("__0_0.distcp", number * size, size))
        for number, item in enumerate(items)
    ]
    first, found = ChunkIndex.from_results(items, results), []
    for rank in range(ranks):
        header = replace(first.header, files=[f"__{rank}_0.distcp"])
        begin = first.begin + np.array([rank * ROWS, 0])
        found.append(zlib.compress(replace(first, header=header, begin=begin).to_bytes(), 1))
    return found


def cpu_time() -> float:
    """CPU seconds of this process and of the children it waited for: they do not depend on what else runs here."""
    return sum(os.times()[:4])


class Stalls(threading.Thread):
    """How long a thread that only wants the interpreter for a moment has to wait for it, at most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self.ends = 0.0, threading.Event()

    def run(self) -> None:
        before = time.perf_counter()
        while not self.ends.wait(0.001):
            now = time.perf_counter()
            self.longest, before = max(self.longest, now - before), now


def step_assign(options: argparse.Namespace) -> dict[str, Any]:
    """Each rank: hash its shards, and compute from the keys of all ranks which it writes."""
    begin = cpu_time()
    mine = shard_keys(write_items(0, options.ranks, options.tensors))
    hashed = cpu_time() - begin
    rest = np.random.default_rng(0).integers(0, 1 << 62, (options.ranks - 1, options.tensors, 3), np.int64)
    everybody = [mine, *(np.ascontiguousarray(keys).view(KEY_DTYPE).reshape(-1) for keys in rest)]
    begin = cpu_time()
    assert assign_writers(everybody)[0].all()
    return {"seconds": hashed + cpu_time() - begin, "received_mib": sum(k.nbytes for k in everybody) / 2**20}


def step_merge(options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0: the indexes of all ranks to ``.metadata`` and the index of the checkpoint."""
    parts = rank_indexes(options.ranks, options.tensors)
    stalls = Stalls()
    stalls.start()
    begin = cpu_time()
    index = ChunkIndex.merge([ChunkIndex.from_bytes(zlib.decompress(part)) for part in parts])
    merged = cpu_time() - begin
    write_dcp_metadata(index, options.work / ".metadata")
    metadata = cpu_time() - begin - merged
    digest = sha256_file(options.work / ".metadata")
    data = index.to_bytes(digest)
    (options.work / INDEX_FILE).write_bytes(data)
    kept = zlib.compress((options.work / ".metadata").read_bytes(), 1)
    seconds = cpu_time() - begin
    stalls.ends.set()
    sizes = {".metadata": (options.work / ".metadata").stat().st_size, INDEX_FILE: len(data)}
    files = {".metadata": digest, INDEX_FILE: hashlib.sha256(data).hexdigest()}
    files |= {f"__{rank}_0.distcp": "0" * 64 for rank in range(options.ranks)}
    write_json(options.work / "manifest.json", {"kind": "checkpoint", "key": "1", "files": files, "sizes": sizes})
    return {
        "seconds": seconds,
        "merge_seconds": merged,
        "metadata_seconds": metadata,
        "stall": stalls.longest,
        "received_mib": sum(map(len, parts)) / 2**20,
        "metadata_mib": sizes[".metadata"] / 2**20,
        "index_mib": len(data) / 2**20,
        "kept_mib": len(kept) / 2**20,
        "child_peak_mib": peak_bytes(resource.RUSAGE_CHILDREN) / 2**20,
    }


def wanted_region(options: argparse.Namespace, shift: int) -> tuple[list[int], list[int]]:
    """The shard of the middle rank; with a shift not one that was saved, as after a change of ranks."""
    return [options.ranks // 2 * ROWS + shift, 0], [ROWS, COLUMNS]


def step_load(options: argparse.Namespace) -> dict[str, Any]:
    """Each rank: the manifest and the index of the checkpoint, and the reads of its own shards."""
    begin = cpu_time()
    index = read_index(options.work)
    assert index is not None
    read = cpu_time() - begin
    items = 0
    for shift in (0, ROWS // 2):
        region = wanted_region(options, shift)
        metadata = index.metadata(dict.fromkeys(names(options.tensors), region))
        items += plan_reads(metadata, region)
    assert items == 3 * options.tensors
    return {"seconds": cpu_time() - begin, "read_seconds": read, "reads": items}


def plan_reads(metadata: Any, region: tuple[list[int], list[int]]) -> int:
    chunk = ChunkStorageMetadata(torch.Size(region[0]), torch.Size(region[1]))
    entries = metadata.state_dict_metadata.items()
    plan = [item for name, entry in entries for item in create_read_items_for_chunk_list(name, entry, [chunk])]
    assert all(item.storage_index in metadata.storage_data for item in plan)
    return len(plan)


def step_dcp(options: argparse.Namespace) -> dict[str, Any]:
    """The same from ``.metadata``."""
    begin = cpu_time()
    metadata = read_metadata(options.work / ".metadata")
    read = cpu_time() - begin
    items = sum(plan_reads(metadata, wanted_region(options, shift)) for shift in (0, ROWS // 2))
    return {"seconds": cpu_time() - begin, "read_seconds": read, "reads": items}


def step_slots(options: argparse.Namespace) -> dict[str, Any]:
    """Each rank: the slots of its node (8 ranks), and the reads of its own shards."""
    slots = []
    for rank in range(8):
        directory = options.work / f"rank-{rank}-of-{options.ranks}"
        directory.mkdir(exist_ok=True)
        bytes_ = ROWS * COLUMNS * 4
        specs = [
            ShardSpec(
                name, "float32", [options.ranks * ROWS, COLUMNS], [rank * ROWS, 0], [ROWS, COLUMNS], at * bytes_, bytes_
            )
            for at, name in enumerate(names(options.tensors))
        ]
        write_json(directory / "layout.json", [asdict(spec) for spec in specs])
        slots.append(StagedSlot(directory / "slot-0.bin", rank, options.ranks, SlotHeader(1, UNKNOWN_LINEAGE)))
    begin = cpu_time()
    one = plan_slots(slots[:1])
    same = cpu_time() - begin
    assert plan_slots(slots) == one == options.tensors
    return {"seconds": cpu_time() - begin, "same_layout_seconds": same, "reads": one}


def plan_slots(slots: list[StagedSlot]) -> int:
    metadata = SlotReader(slots).read_metadata()
    region = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([ROWS, COLUMNS]))
    entries: Any = metadata.state_dict_metadata.items()
    return sum(len(create_read_items_for_chunk_list(name, entry, [region])) for name, entry in entries)


STEPS = {"assign": step_assign, "merge": step_merge, "load": step_load, "slots": step_slots, "dcp": step_dcp}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=2100)
    parser.add_argument("--work", type=Path, default=Path("restart_plan"))
    parser.add_argument("--dcp", action="store_true", help="also read .metadata itself")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.step:
        torch.set_num_threads(1)
        before = peak_bytes() / 2**20
        found = STEPS[options.step](options)
        found["peak_mib"] = peak_bytes() / 2**20
        found["start_mib"] = before
        shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}
        show_json({"step": options.step, **shown})
        return
    for step in STEPS:
        if step != "dcp" or options.dcp:
            sizes = ("--ranks", options.ranks, "--tensors", options.tensors)
            run_child("restart_plan", "--step", step, "--work", options.work, *sizes)
