"""Near deduplication of many documents: time, and the peak memory of every task.

    python -m benchmarks near_dup_scale --work /tmp/near --documents 10000000

It begins just below the text: MinHash signatures are drawn at random, a tenth of the documents being near copies of
earlier ones, and written as the band rows that 'z2a corpus build' makes of a shard. What follows is the real thing:
links, components and drops. Each task runs in a process of its own, so the memory is that of a worker with one task; a
line for each kind of task has their number, the wall time of all, and the largest peak. The last line checks that near
copies were found, and projects: band rows take bytes_per_document x documents, in as many partitions as keep a task
within its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import benchmark_parser, peak_bytes, show_json

from zero2all.corpus.dedup.drops import DROP_DTYPE
from zero2all.corpus.dedup.near import band_dtype, band_rows, node_dtype
from zero2all.corpus.dedup.shingles import band_hashes, pack_sketches
from zero2all.corpus.dedup.shuffle import GID_DTYPE, DedupParams, load_rows, save_sorted
from zero2all.corpus.dedup.stage import find_near_duplicates

SHARD_DOCUMENTS = 100_000
COPY_SHARE, CHANGED_SLOTS = 0.1, 0.05


def write_shard(number: int, count: int, out: Path, params: DedupParams) -> int:
    """A tenth are copies of documents of the first shard, with one slot in twenty changed. Returns the copies."""
    source = np.random.default_rng(0).integers(0, 1 << 32, (SHARD_DOCUMENTS, params.slots), np.uint32)
    numbers = np.random.default_rng(number)
    values = source[:count] if number == 0 else numbers.integers(0, 1 << 32, (count, params.slots), np.uint32)
    copies = 0
    if number:
        is_copy = numbers.random(count) < COPY_SHARE
        copies = int(is_copy.sum())
        copied = source[numbers.integers(0, len(source), copies)]
        changed = numbers.random(copied.shape) < CHANGED_SLOTS
        copied[changed] = values[is_copy][changed]
        values[is_copy] = copied
    nodes = np.zeros(count, node_dtype(params))
    nodes["gid"] = np.frombuffer(np.random.default_rng([1, number]).bytes(16 * count), GID_DTYPE)
    nodes["shard"], nodes["sketch"] = number, pack_sketches(values)
    save_sorted(out, band_rows(nodes, band_hashes(values, params.bands), params), "hash", "rank", "gid")
    return copies


def measured(function: Callable[..., Any], task: tuple[Any, ...]) -> tuple[Any, int]:
    return function(*task), peak_bytes()


def run_in(workers: int) -> Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]:
    def run(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        begin = time.perf_counter()
        context = get_context("forkserver")
        with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
            found = list(pool.map(measured, [function] * len(tasks), tasks))
        seconds, peak = time.perf_counter() - begin, max(peak for _, peak in found)
        line = {"step": function.__name__, "tasks": len(tasks), "seconds": round(seconds, 1), "peak_mib": peak >> 20}
        show_json(line)
        return [result for result, _ in found]

    return run


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--task-gib", type=float, default=2.0)
    options = parser.parse_args()
    params, run = DedupParams(task_bytes=int(options.task_gib * 2**30)), run_in(options.workers)
    firsts = range(0, options.documents, SHARD_DOCUMENTS)
    counts = [min(SHARD_DOCUMENTS, options.documents - first) for first in firsts]
    bands = [options.work / "bands" / f"{number:05}.npy" for number in range(len(counts))]
    begin = time.perf_counter()
    tasks = [(number, count, bands[number], params) for number, count in enumerate(counts)]
    copies = sum(run(write_shard, tasks))
    made = time.perf_counter()
    files = find_near_duplicates(bands, options.documents, options.work / "near", params, run)
    dropped = len(np.concatenate([np.zeros(0, DROP_DTYPE), *map(load_rows, files)]))
    row = band_dtype(params).itemsize
    line = {
        "documents": options.documents,
        "near_copies": copies,
        "dropped": dropped,
        "synthesis_seconds": round(made - begin),
        "dedup_seconds": round(time.perf_counter() - made),
        "bytes_per_document": row * params.bands,
        "partitions": params.partitions_for(options.documents * params.bands, row),
        "partitions_at_1e9": params.partitions_for(10**9 * params.bands, row),
    }
    show_json(line)
