"""The steps of deduplication in order. The caller chooses what runs the tasks, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.corpus.dedup.components import EDGE_DTYPE, RunTasks, connect_components
from zero2all.corpus.dedup.drops import collect_shard_drops
from zero2all.corpus.dedup.exact import KEY_DTYPE, write_exact_drops, write_exact_keys
from zero2all.corpus.dedup.near import (
    band_dtype,
    labeled_dtype,
    write_labeled_nodes,
    write_near_drops,
    write_near_links,
    write_signatures,
)
from zero2all.corpus.dedup.params import DedupParams
from zero2all.errors import UsageError


def run_locally(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One task after the other, in this process."""
    return [function(*one) for one in arguments]


@dataclass(frozen=True)
class DuplicateCounts:
    shards: list[str]
    compared: int
    """Documents compared for near duplicates."""
    dropped: dict[str, int]
    """Documents by reason."""


def find_duplicates(
    shards: Sequence[Path], work: Path, params: DedupParams, run_tasks: RunTasks = run_locally, near: bool = True
) -> tuple[dict[Path, Path], DuplicateCounts]:
    """For every shard a file below ``work/drops`` of dropped documents and those kept for them; and counts.

    The result depends on the documents and the parameters alone: not on the order of shards, the partitions, or what
    runs the tasks.
    """
    shards = sorted(shards, key=lambda path: path.name)
    if len({path.name for path in shards}) < len(shards):
        raise UsageError("two shards have the same name; give each its own, since the output uses their names")
    numbered = list(enumerate(shards))

    def files(step: str, suffix: str = ".npy") -> list[Path]:
        return [work / step / f"{path.name}{suffix}" for path in shards]

    keys, bands, lists = files("exact_keys"), files("bands"), files("drops", "")
    compared = 0

    counts = run_tasks(write_exact_keys, [(shard, number, keys[number], params) for number, shard in numbered])
    partitions = params.partitions_for(sum(counts), KEY_DTYPE.itemsize)
    exact = _part_files(work / "exact", partitions)
    run_tasks(write_exact_drops, [(keys, part, partitions, out) for part, out in enumerate(exact)])
    drop_files = exact
    if near:
        seen = run_tasks(
            write_signatures, [(shard, number, bands[number], params, exact) for number, shard in numbered]
        )
        compared = sum(one["compared"] for one in seen)
        drop_files = [*exact, *find_near_duplicates(bands, compared, work, params, run_tasks)]
    dropped = run_tasks(collect_shard_drops, [(drop_files, number, lists[number]) for number, _ in numbered])
    found = DuplicateCounts([path.name for path in shards], compared, _sum_counts(dropped))
    return dict(zip(shards, lists, strict=True)), found


def find_near_duplicates(
    bands: Sequence[Path], documents: int, work: Path, params: DedupParams, run_tasks: RunTasks
) -> list[Path]:
    """Files of drops from the band rows of that many documents. No task holds more than ``params.task_bytes``."""
    partitions = params.partitions_for(documents * params.bands, band_dtype(params).itemsize)
    edges, nodes = _part_files(work / "edges", partitions), _part_files(work / "nodes", partitions)
    tasks = [(bands, part, partitions, edges[part], nodes[part], params) for part in range(partitions)]
    link_rows, node_rows = (sum(column) for column in zip(*run_tasks(write_near_links, tasks), strict=True))
    joined = params.partitions_for(link_rows, EDGE_DTYPE.itemsize, at_least=1)
    labels, _ = connect_components(edges, work / "components", joined, run_tasks)
    partitions = params.partitions_for(node_rows, labeled_dtype(params).itemsize)
    labeled, near = _part_files(work / "labeled", partitions), _part_files(work / "near", partitions)
    run_tasks(write_labeled_nodes, [(nodes, labels, part, partitions, out, params) for part, out in enumerate(labeled)])
    run_tasks(write_near_drops, [(labeled, part, partitions, out, params) for part, out in enumerate(near)])
    return near


def _part_files(directory: Path, partitions: int) -> list[Path]:
    return [directory / f"{part:05}.npy" for part in range(partitions)]


def _sum_counts(counted: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in counted for name in counts)
    return {name: sum(counts[name] for counts in counted) for name in names}
