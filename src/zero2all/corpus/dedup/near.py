"""Near deduplication: MinHash-LSH, one shuffle of band hashes, components, and a direct comparison with what is kept.

Every document sends one row to each of its bands. Documents that share a bucket are compared by sketch, and linked if
they are similar. Links make components; but a chain of small changes can join documents that are not similar at all, so
a document is dropped only if it is similar to the very document that is kept for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zero2all.corpus.dedup.drops import DROP_DTYPE, NEAR, read_shard_rows
from zero2all.corpus.dedup.shingles import (
    Counts,
    Hashes,
    Sketches,
    band_hashes,
    estimate_jaccard,
    hash_ngrams,
    hash_units,
    minhash_signatures,
    pack_sketches,
)
from zero2all.corpus.dedup.shuffle import (
    GID_DTYPE,
    LABEL_COLUMNS,
    DedupParams,
    Rows,
    argsort_by,
    document_labels,
    gids_to_bytes,
    gids_to_hex,
    group_starts,
    load_rows,
    read_columns,
    read_partition,
    save_rows,
    save_sorted,
    split_by_characters,
)

SIGNATURE_CHARACTERS = 2**19  # per batch of signatures: few values per character, and faster with many documents
MAX_BUCKET_LEADERS, MAX_COMPONENT_LEADERS = 16, 1024
EDGE_DTYPE: Final = np.dtype([("one", GID_DTYPE), ("other", GID_DTYPE)])
"""In both directions, sorted. As labels: from a document to the smallest gid of its component."""


def node_dtype(params: DedupParams) -> np.dtype[np.void]:
    sketch = (params.slots + 1) // 2
    return np.dtype([("gid", GID_DTYPE), ("rank", "<u2"), ("shard", "<u4"), ("sketch", "u1", (sketch,))])


def band_dtype(params: DedupParams) -> np.dtype[np.void]:
    return np.dtype([("hash", "<u8"), *_dtype_fields(node_dtype(params))])


def labeled_dtype(params: DedupParams) -> np.dtype[np.void]:
    return np.dtype([("component", GID_DTYPE), *_dtype_fields(node_dtype(params))])


def _dtype_fields(kind: np.dtype[np.void]) -> Iterator[tuple[str, np.dtype[np.generic]]]:
    for name in kind.names or ():
        yield name, kind[name]


def write_signatures(shard: Path, number: int, out: Path, params: DedupParams, dropped: Sequence[Path]) -> int:
    """Write the band rows of a shard, sorted by hash; those in ``dropped`` are skipped. Returns how many."""
    dropped_counts = Counter(gids_to_hex(read_shard_rows(dropped, number)["gid"]))
    parts = [np.zeros(0, dtype=band_dtype(params))]
    compared = 0
    for columns in read_columns(shard, [*LABEL_COLUMNS, "content"]):
        for nodes, hashes in compute_signatures(
            columns, remaining_mask(columns["gid"], dropped_counts), number, params
        ):
            parts.append(band_rows(nodes, hashes, params))
            compared += len(nodes)
    save_sorted(out, np.concatenate(parts), "hash", "rank", "gid")
    return compared


def remaining_mask(gids: Sequence[str], dropped_counts: Counter[str]) -> NDArray[np.bool_]:
    """Which documents are not dropped. A gid goes as often as it was dropped: of two equal records one stays."""
    present = np.ones(len(gids), dtype=bool)
    for place, gid in enumerate(gids):
        if dropped_counts[gid] > 0:
            dropped_counts[gid] -= 1
            present[place] = False
    return present


def compute_signatures(
    columns: dict[str, list[str]], wanted: NDArray[np.bool_], number: int, params: DedupParams
) -> Iterator[tuple[Rows, Hashes]]:
    """Nodes and band hashes of the wanted documents that are long enough, some at a time."""
    gids = gids_to_bytes(columns["gid"])
    priorities, codes = document_labels(columns, params)
    for code in (False, True):
        chosen = np.flatnonzero(wanted & (np.array(codes) == code))
        for batch in split_by_characters(columns["content"], chosen, SIGNATURE_CHARACTERS):
            shingles, counts = shingle_hashes([columns["content"][place] for place in batch], code=code, params=params)
            long_enough = counts >= params.min_shingles
            values = minhash_signatures(shingles, counts, params.slots, params.seed)[long_enough]
            nodes = np.zeros(len(values), dtype=node_dtype(params))
            places = batch[long_enough]
            nodes["gid"], nodes["rank"], nodes["shard"] = gids[places], np.array(priorities)[places], number
            nodes["sketch"] = pack_sketches(values)
            yield nodes, band_hashes(values, params.bands)


def shingle_hashes(texts: Sequence[str], *, code: bool, params: DedupParams) -> tuple[Hashes, Counts]:
    """The hashed shingles of all texts in a row, and how many each text has."""
    return hash_ngrams(hash_units(texts, code=code), params.ngram)


def band_rows(nodes: Rows, hashes: Hashes, params: DedupParams) -> Rows:
    rows = np.zeros(hashes.shape, dtype=band_dtype(params))
    rows["hash"] = hashes
    for name in nodes.dtype.names or ():
        rows[name] = nodes[name][:, None]
    return rows.reshape(-1)


def write_near_links(
    files: Sequence[Path], partition: int, partitions: int, edges: Path, nodes: Path, params: DedupParams
) -> int:
    """Link the documents of each bucket to the best document in it that they are similar to. Linear in its size.

    Returns the number of rows of nodes written.
    """
    rows = _in_shared_buckets(read_partition(files, partition, partitions))
    rows = rows[argsort_by(rows, "hash", "rank", "gid")]
    leaders = cluster_by_leader(rows["hash"], rows["sketch"], params, MAX_BUCKET_LEADERS)
    linked = np.flatnonzero(leaders != np.arange(len(rows)))
    found = both_directions(make_edges(rows["gid"][leaders[linked]], rows["gid"][linked]))
    ends = rows[np.union1d(linked, leaders[linked])]
    ends = ends[argsort_by(ends, "gid")]
    ends = ends[group_starts(ends["gid"])]
    node_rows = np.zeros(len(ends), dtype=node_dtype(params))
    for name in node_rows.dtype.names or ():
        node_rows[name] = ends[name]
    save_rows(edges, found)
    save_rows(nodes, node_rows)
    return len(node_rows)


def _in_shared_buckets(rows: Rows) -> Rows:
    """Rows that share their hash with another. Most do not, and need not be sorted and copied any further."""
    hashes = np.ascontiguousarray(rows["hash"])
    order = np.argsort(hashes, kind="stable")
    starts = group_starts(hashes[order])
    sizes = np.diff(starts, append=len(rows))
    return rows[order[np.repeat(sizes > 1, sizes)]]


def cluster_by_leader(
    groups: NDArray[np.generic], sketches: Sketches, params: DedupParams, max_leaders: int
) -> NDArray[np.intp]:
    """For each row the row of its group that it is a near duplicate of, or itself.

    Rows come sorted by group, the best of each group first. The first row leads; similar rows follow it; the first of
    the others leads next. After ``max_leaders`` the rest of a group is skipped, so that no group costs its square.
    """
    leaders = np.arange(len(groups))
    alive = leaders
    for _ in range(max_leaders):
        starts = group_starts(groups[alive])
        sizes = np.diff(starts, append=len(alive))
        lead = np.repeat(alive[starts], sizes)
        several = np.repeat(sizes, sizes) > 1
        behind = several & (lead != alive)
        alive, lead = alive[behind], lead[behind]
        if len(alive) == 0:
            break
        is_near = estimate_jaccard(sketches[alive], sketches[lead], params.slots) >= params.threshold - params.margin
        leaders[alive[is_near]] = lead[is_near]
        alive = alive[~is_near]
    return leaders


def make_edges(one: Rows, other: Rows) -> Rows:
    edges = np.zeros(len(one), dtype=EDGE_DTYPE)
    edges["one"], edges["other"] = one, other
    return edges


def both_directions(edges: Rows) -> Rows:
    """Sorted, each once."""
    edges = np.concatenate([edges, make_edges(edges["other"], edges["one"])])
    edges = edges[argsort_by(edges, "one", "other")]
    return edges[group_starts(edges)]


def connect_components(edge_files: Sequence[Path], out: Path) -> None:
    """Write the labels of all documents with links. A smallest gid itself has no label.

    Links are read a file at a time, so that memory grows with the documents that have links, not with the links.
    """
    ends = [np.unique(load_rows(path)["one"]) for path in edge_files]
    gids = np.unique(np.concatenate([np.zeros(0, dtype=GID_DTYPE), *ends]))
    roots = np.arange(len(gids))
    for path in edge_files:
        edges = load_rows(path)
        roots = union_find(roots, np.searchsorted(gids, edges["one"]), np.searchsorted(gids, edges["other"]))
    children = np.flatnonzero(roots != np.arange(len(gids)))
    save_rows(out, make_edges(gids[children], gids[roots[children]]))


def union_find(parent: Counts, one: Counts, other: Counts) -> Counts:
    """Union-find for all edges at once: hang roots below smaller roots, shorten all paths, until nothing moves."""
    parent = parent.copy()
    while True:
        first, second = parent[one], parent[other]
        apart = first != second
        if not apart.any():
            return parent
        one, other, first, second = one[apart], other[apart], first[apart], second[apart]
        np.minimum.at(parent, np.maximum(first, second), np.minimum(first, second))
        while not np.array_equal(parent, parent[parent]):
            parent = parent[parent]


def write_labeled_nodes(
    node_files: Sequence[Path], labels: Path, partition: int, partitions: int, out: Path, params: DedupParams
) -> int:
    """The nodes of a range of gids with their components, sorted by component. All tasks read each file once."""
    nodes = read_partition(node_files, partition, partitions, "gid")
    nodes = nodes[argsort_by(nodes, "gid")]
    nodes = nodes[group_starts(nodes["gid"])]  # a document has a row from each bucket that it met another in
    known = read_partition([labels], partition, partitions, "one")
    rows = np.zeros(len(nodes), dtype=labeled_dtype(params))
    for name in nodes.dtype.names or ():
        rows[name] = nodes[name]
    rows["component"] = nodes["gid"]  # the smallest of a component has no label
    places = np.searchsorted(nodes["gid"], known["one"])
    rows["component"][places] = known["other"]
    save_sorted(out, rows, "component", "rank", "gid")
    return len(rows)


def write_near_drops(files: Sequence[Path], partition: int, partitions: int, out: Path, params: DedupParams) -> int:
    """In each component of the partition keep the best document and drop what is similar to it; then the next best."""
    nodes = read_partition(files, partition, partitions, "component")
    nodes = nodes[argsort_by(nodes, "component", "rank", "gid")]
    leaders = cluster_by_leader(nodes["component"], nodes["sketch"], params, MAX_COMPONENT_LEADERS)
    duplicates = np.flatnonzero(leaders != np.arange(len(nodes)))
    drops = np.zeros(len(duplicates), dtype=DROP_DTYPE)
    drops["shard"], drops["gid"], drops["reason"] = nodes["shard"][duplicates], nodes["gid"][duplicates], NEAR
    drops["kept"] = nodes["gid"][leaders[duplicates]]
    save_sorted(out, drops, "shard", "gid")
    return len(drops)
