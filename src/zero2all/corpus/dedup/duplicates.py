"""The steps of deduplication in order. The caller chooses what runs the tasks, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.corpus.dedup.drops import collect_shard_drops
from zero2all.corpus.dedup.exact import write_exact_drops, write_exact_keys
from zero2all.corpus.dedup.near import connected_components, write_near_drops, write_near_links, write_signatures
from zero2all.corpus.dedup.params import DedupParams
from zero2all.errors import UsageError

RunTasks = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


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
    parts = range(params.partitions)

    def files(step: str, suffix: str = ".npy") -> list[Path]:
        return [work / step / f"{path.name}{suffix}" for path in shards]

    def part_files(step: str) -> list[Path]:
        return [work / step / f"{part:05}.npy" for part in parts]

    keys, exact, bands = files("exact_keys"), part_files("exact"), files("bands")
    edges, nodes, near_files = part_files("edges"), part_files("nodes"), part_files("near")
    labels, lists = work / "components.npy", files("drops", "")
    compared = 0

    run_tasks(write_exact_keys, [(shard, number, keys[number], params) for number, shard in numbered])
    run_tasks(write_exact_drops, [(keys, part, params.partitions, exact[part]) for part in parts])
    if near:
        seen = run_tasks(
            write_signatures, [(shard, number, bands[number], params, exact) for number, shard in numbered]
        )
        compared = sum(counts["compared"] for counts in seen)
        run_tasks(
            write_near_links, [(bands, part, params.partitions, edges[part], nodes[part], params) for part in parts]
        )
        run_tasks(connected_components, [(edges, labels)])
        run_tasks(
            write_near_drops, [(nodes, labels, part, params.partitions, near_files[part], params) for part in parts]
        )
    drop_files = [*exact, *near_files] if near else exact
    dropped = run_tasks(collect_shard_drops, [(drop_files, number, lists[number]) for number, _ in numbered])
    counts = DuplicateCounts([path.name for path in shards], compared, _sum_counts(dropped))
    return dict(zip(shards, lists, strict=True)), counts


def _sum_counts(counted: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in counted for name in counts)
    return {name: sum(counts[name] for counts in counted) for name in names}
