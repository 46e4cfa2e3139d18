"""Near deduplication in bounded memory gives what one task with all rows in memory gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero2all.corpus.dedup.drops import DROP_DTYPE
from zero2all.corpus.dedup.near import (
    band_rows,
    both_directions,
    cluster_by_leader,
    connect_components,
    make_edges,
    node_dtype,
)
from zero2all.corpus.dedup.shingles import band_hashes, pack_sketches
from zero2all.corpus.dedup.shuffle import GID_DTYPE, DedupParams, load_rows, save_rows, save_sorted
from zero2all.corpus.dedup.stage import find_near_duplicates, run_locally


def gids(count: int, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(16 * count), GID_DTYPE)


def components_of(links: Iterable[tuple[bytes, bytes]]) -> list[set[bytes]]:
    """By joining sets, one link after the other."""
    part_of: dict[bytes, set[bytes]] = {}
    for one, other in links:
        joined = part_of.setdefault(one, {one}) | part_of.setdefault(other, {other})
        part_of |= dict.fromkeys(joined, joined)
    return list({id(part): part for part in part_of.values()}.values())


def shaped_links(shape: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    if shape == "chain":  # the longest that so many documents can make, in any order of gids
        return np.arange(count - 1), np.arange(1, count)
    if shape == "star":
        return np.zeros(count - 1, np.int64), np.arange(1, count)
    return numbers.integers(0, count, count // 2), numbers.integers(0, count, count // 2)


@pytest.mark.parametrize("shape", ["chain", "star", "random"])
def test_components_are_those_of_a_graph_library(shape: str, tmp_path: Path) -> None:
    names = gids(700, 1)
    one, other = shaped_links(shape, 700, 2)
    one, other = one[one != other], other[one != other]
    edges = both_directions(make_edges(names[one], names[other]))
    order = np.random.default_rng(3).permutation(len(edges))
    files = [tmp_path / f"{part}.npy" for part in range(3)]
    for part, path in enumerate(files):
        save_sorted(path, edges[order[part::3]], "one", "other")
    connect_components(files, tmp_path / "labels.npy")
    found = {row["one"]: row["other"] for row in load_rows(tmp_path / "labels.npy")}
    parts = components_of((names[a], names[b]) for a, b in zip(one, other, strict=True))
    expected = {gid: min(part) for part in parts for gid in part if gid != min(part)}
    assert found == expected


def write_bands(directory: Path, params: DedupParams, documents: int, shards: int, seed: int) -> list[Path]:
    """Band rows of documents of which many are near copies of others, with a chain of small changes among them."""
    numbers = np.random.default_rng(seed)
    names, paths = gids(documents, seed), []
    signatures = numbers.integers(0, 1 << 32, (documents, params.slots), np.uint32)
    for place in range(1, documents):
        if numbers.random() < 0.6:  # a copy of an earlier document with some changes
            signatures[place] = signatures[numbers.integers(max(0, place - 40), place)]
            changed = numbers.random(params.slots) < numbers.choice([0.0, 0.05, 0.15])
            signatures[place, changed] = numbers.integers(0, 1 << 32, changed.sum(), np.uint32)
    for shard in range(shards):
        mine = np.arange(shard, documents, shards)
        nodes = np.zeros(len(mine), node_dtype(params))
        nodes["gid"], nodes["rank"], nodes["shard"] = names[mine], numbers.integers(0, 3, len(mine)), shard
        nodes["sketch"] = pack_sketches(signatures[mine])
        rows = band_rows(nodes, band_hashes(signatures[mine], params.bands), params)
        paths.append(directory / f"{shard}.npy")
        save_sorted(paths[-1], rows, "hash", "rank", "gid")
    return paths


def plain_drops(bands: Sequence[Path], params: DedupParams) -> set[tuple[bytes, bytes]]:
    """The same decisions with everything in memory and no shuffle."""
    rows = np.concatenate([load_rows(path) for path in bands])
    rows = rows[np.lexsort((rows["gid"], rows["rank"], rows["hash"]))]
    leaders = cluster_by_leader(rows["hash"], rows["sketch"], params, 16)
    linked = np.flatnonzero(leaders != np.arange(len(rows)))
    parts = components_of((rows["gid"][leaders[place]], rows["gid"][place]) for place in linked)
    node_of = {row["gid"]: row for row in rows}
    drops = set()
    for part in parts:
        nodes = np.array(sorted((node_of[gid] for gid in part), key=lambda row: (row["rank"], row["gid"])), rows.dtype)
        lead = cluster_by_leader(np.zeros(len(nodes)), nodes["sketch"], params, 1024)
        drops |= {(nodes["gid"][at], nodes["gid"][lead[at]]) for at in range(len(nodes)) if lead[at] != at}
    return drops


def recorded(calls: list[tuple[str, int]]) -> Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]:
    def run(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls.append((function.__name__, len(tasks)))
        return run_locally(function, tasks)

    return run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bounded_memory_gives_the_same_drops(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.corpus.dedup.shuffle.TASK_OVERHEAD_BYTES", 0)
    roomy, tight = DedupParams(partitions=1), DedupParams(partitions=1, task_bytes=100_000)
    bands = write_bands(tmp_path / "bands", roomy, 600, 4, seed)
    expected = plain_drops(bands, roomy)
    assert len(expected) > 100
    for name, params in (("roomy", roomy), ("tight", tight)):
        calls: list[tuple[str, int]] = []
        files = find_near_duplicates(bands, 600, tmp_path / name, params, recorded(calls))
        rows = np.concatenate([np.zeros(0, DROP_DTYPE), *map(load_rows, files)])
        assert {(row["gid"], row["kept"]) for row in rows} == expected
        counted = dict(calls)
        assert (counted["write_near_links"] > 20) == (name == "tight")


def test_partitions_follow_the_number_of_documents() -> None:
    params = DedupParams()
    rows = {documents: params.partitions_for(documents * params.bands, 86) for documents in (10**4, 10**7, 10**9)}
    assert rows[10**4] == 16
    for documents, partitions in rows.items():
        assert documents * params.bands * 86 * 4 / partitions <= params.task_bytes
    assert rows[10**9] == pytest.approx(100 * rows[10**7], rel=0.05)


def test_a_range_of_gids_is_read_from_an_object_store_too(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    from zero2all.base.paths import to_path
    from zero2all.corpus.dedup.shuffle import read_partition

    names = np.sort(gids(500, 5))
    edges = make_edges(names, names[::-1])
    local, remote = tmp_path / "edges.npy", to_path("memory://gid-ranges/edges.npy")
    for path in (local, remote):
        save_rows(path, edges)
    for part in range(3):
        assert np.array_equal(read_partition([local], part, 3, "one"), read_partition([remote], part, 3, "one"))
    assert sum(len(read_partition([local], part, 3, "one")) for part in range(3)) == 500
