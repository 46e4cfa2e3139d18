"""Connected components of links, in bounded memory: each task holds the links of one range of gids.

Alternating stars (Kiveris et al., "Connected Components in MapReduce and Beyond", 2014): in a large star every document
links its larger neighbours to its smallest one, in a small star its smaller ones. After some rounds each component is a
star around its smallest gid. A round is two shuffles; their number grows with the logarithm of the longest chain.
Links that fit into the memory of one task are joined there by union-find instead; the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from zero2all.corpus.dedup.shingles import Counts
from zero2all.corpus.dedup.shuffle import (
    GID_DTYPE,
    Rows,
    argsort_by,
    group_starts,
    load_rows,
    read_partition,
    save_rows,
)
from zero2all.errors import Z2aError

EDGE_DTYPE: Final = np.dtype([("one", GID_DTYPE), ("other", GID_DTYPE)])
"""In both directions, sorted. As labels: from a document to the smallest gid of its component."""
MAX_ROUNDS = 64
FACTORS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)  # odd, of no meaning
EdgeSum = tuple[int, int]
"""Number of links, and a sum of their hashes: two equal sets of links have the same."""
RunTasks = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


def connect_components(
    edge_files: Sequence[Path], work: Path, partitions: int, run_tasks: RunTasks
) -> tuple[list[Path], int]:
    """Files of labels, each of a range of gids, and the rounds it took. A smallest gid itself has no label."""
    if partitions == 1:
        out = work / "components.npy"
        run_tasks(join_in_memory, [(edge_files, out)])
        return [out], 0
    files, before = list(edge_files), None
    for number in range(MAX_ROUNDS):
        for kind in ("large", "small"):
            outs = [work / f"{kind}-{number % 2}-{part:05}.npy" for part in range(partitions)]
            sums = run_tasks(write_star, [(files, part, partitions, kind, outs[part]) for part in range(partitions)])
            files = outs
            if kind == "large":
                after = tuple(sum(column) for column in zip(*sums, strict=True))
                if after == before:
                    labels = [work / f"{part:05}.npy" for part in range(partitions)]
                    tasks = [(files, part, partitions, labels[part]) for part in range(partitions)]
                    run_tasks(write_labels, tasks)
                    return labels, number
                before = after
    raise Z2aError(f"links of near duplicates in {work} did not converge in {MAX_ROUNDS} rounds")


def join_in_memory(edge_files: Sequence[Path], out: Path) -> None:
    """The plain way: all links at once, as integers."""
    edges = np.concatenate([np.zeros(0, dtype=EDGE_DTYPE), *(load_rows(path) for path in edge_files)])
    gids, numbers = np.unique(np.concatenate([edges["one"], edges["other"]]), return_inverse=True)
    ends = numbers.astype(np.int64)
    roots = union_find(ends[: len(edges)], ends[len(edges) :], len(gids))
    children = np.flatnonzero(roots != np.arange(len(gids)))
    save_rows(out, make_edges(gids[children], gids[roots[children]]))


def union_find(one: Counts, other: Counts, count: int) -> Counts:
    """Union-find for all edges at once: hang roots below smaller roots, shorten all paths, until nothing moves."""
    parent = np.arange(count, dtype=np.int64)
    while True:
        first, second = parent[one], parent[other]
        apart = first != second
        if not apart.any():
            return parent
        one, other, first, second = one[apart], other[apart], first[apart], second[apart]
        np.minimum.at(parent, np.maximum(first, second), np.minimum(first, second))
        while not np.array_equal(parent, parent[parent]):
            parent = parent[parent]


def write_star(
    files: Sequence[Path], partition: int, partitions: int, kind: Literal["large", "small"], out: Path
) -> EdgeSum:
    """One star operation on a range of gids. Returns the sum of the links that it read."""
    rows = distinct(read_partition(files, partition, partitions, "one"))
    is_down = rows["other"] < rows["one"]
    total = _edge_sum(rows[is_down])
    if kind == "small":
        rows = rows[is_down]
    starts = group_starts(rows["one"])
    sizes = np.diff(starts, append=len(rows))
    smallest = rows["other"][starts]  # the first of each group: rows are sorted
    if kind == "large":
        centers = rows["one"][starts]
        smallest = np.where(smallest < centers, smallest, centers)
        is_larger = rows["other"] > rows["one"]
        found = make_edges(rows["other"][is_larger], np.repeat(smallest, sizes)[is_larger])
    else:
        links = make_edges(rows["other"], np.repeat(smallest, sizes))
        found = np.concatenate([links[links["one"] != links["other"]], make_edges(rows["one"][starts], smallest)])
    save_rows(out, both_directions(found))
    return total


def write_labels(files: Sequence[Path], partition: int, partitions: int, out: Path) -> int:
    rows = distinct(read_partition(files, partition, partitions, "one"))
    labels = rows[rows["other"] < rows["one"]]
    save_rows(out, labels)
    return len(labels)


def make_edges(one: Rows, other: Rows) -> Rows:
    edges = np.zeros(len(one), dtype=EDGE_DTYPE)
    edges["one"], edges["other"] = one, other
    return edges


def both_directions(edges: Rows) -> Rows:
    return distinct(np.concatenate([edges, make_edges(edges["other"], edges["one"])]))


def distinct(edges: Rows) -> Rows:
    """Sorted, each once."""
    edges = edges[argsort_by(edges, "one", "other")]
    return edges[group_starts(edges)]


def _edge_sum(edges: Rows) -> EdgeSum:
    words = np.ascontiguousarray(edges).view("<u8").reshape(-1, 4)
    mixed = words * np.array(FACTORS, np.uint64)
    folded = mixed[:, 0] ^ mixed[:, 1] ^ mixed[:, 2] ^ mixed[:, 3]
    folded = (folded ^ (folded >> np.uint64(31))) * np.uint64(FACTORS[0])
    return len(edges), int(folded.sum(dtype=np.uint64))
