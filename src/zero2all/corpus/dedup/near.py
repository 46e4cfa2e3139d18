"""Near deduplication: MinHash-LSH, one shuffle of band hashes, components, and a direct look at what is to be kept.

Every document sends one row to each of its bands. Documents that meet in a band are compared by sketch, and linked if
they are alike. Links make components; but a chain of small changes can join documents that are not alike at all, so
in the end a document goes only if it is like the very document that stays for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zero2all.corpus.dedup.drops import DROP, NEAR, rows_of_shard
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.shingles import Counts, Hashes, grams, split_units
from zero2all.corpus.dedup.shuffle import (
    CHUNK_CHARACTERS,
    GID,
    LABELS,
    Rows,
    batches,
    gid_texts,
    gids_of,
    group_starts,
    labels_of,
    load_rows,
    read_columns,
    read_partition,
    save_rows,
    save_sorted,
    sorted_by,
)
from zero2all.corpus.dedup.sketch import Sketches, band_hashes, compress, signatures, similarity

BATCH_CHARACTERS = 2**19  # signed at once: has few numbers for a character, and likes many documents
BUCKET_LEADERS, COMPONENT_LEADERS = 16, 1024
EDGE = np.dtype([("one", GID), ("other", GID)])
LABEL = np.dtype([("gid", GID), ("component", "<i8")])


def node_type(params: DedupParams) -> np.dtype[np.void]:
    sketch = (params.slots + 1) // 2
    return np.dtype([("gid", GID), ("rank", "<u2"), ("shard", "<u4"), ("sketch", "u1", (sketch,))])


def band_type(params: DedupParams) -> np.dtype[np.void]:
    return np.dtype([("hash", "<u8"), *((name, kind) for name, kind in _fields(node_type(params)))])


def _fields(kind: np.dtype[np.void]) -> Iterator[tuple[str, np.dtype[np.generic]]]:
    for name in kind.names or ():
        yield name, kind[name]


def near_signatures(
    shard: Path, number: int, out: Path, params: DedupParams, dropped: Sequence[Path] = ()
) -> dict[str, int]:
    """Write the band rows of a shard, sorted by hash; documents that ``dropped`` names already are left out."""
    gone = Counter(gid_texts(rows_of_shard(dropped, number)["gid"]))
    parts = [np.zeros(0, dtype=band_type(params))]
    documents = compared = 0
    for columns in read_columns(shard, [*LABELS, "content"]):
        documents += len(columns["gid"])
        for nodes, hashes in signed(columns, still_there(columns["gid"], gone), number, params):
            parts.append(band_rows(nodes, hashes, params))
            compared += len(nodes)
    save_sorted(out, np.concatenate(parts), "hash", "rank", "gid")
    return {"documents": documents, "compared": compared}


def still_there(gids: Sequence[str], gone: Counter[str]) -> NDArray[np.bool_]:
    """Which documents are not gone. A gid goes as often as it was dropped: of twins in one file one stays."""
    present = np.ones(len(gids), dtype=bool)
    for place, gid in enumerate(gids):
        if gone[gid] > 0:
            gone[gid] -= 1
            present[place] = False
    return present


def signed(
    columns: dict[str, list[str]], wanted: NDArray[np.bool_], number: int, params: DedupParams
) -> Iterator[tuple[Rows, Hashes]]:
    """Nodes and band hashes of the wanted documents that are long enough, some at a time."""
    gids = gids_of(columns["gid"])
    ranks, codes = labels_of(columns, params)
    for code in (False, True):
        chosen = np.flatnonzero(wanted & (np.array(codes) == code))
        for batch in batches(columns["content"], chosen, BATCH_CHARACTERS):
            shingles, counts = shingle_hashes([columns["content"][place] for place in batch], code, params)
            long_enough = counts >= params.min_shingles
            values = signatures(shingles, counts, params.slots, params.seed)[long_enough]
            nodes = np.zeros(len(values), dtype=node_type(params))
            places = batch[long_enough]
            nodes["gid"], nodes["rank"], nodes["shard"] = gids[places], np.array(ranks)[places], number
            nodes["sketch"] = compress(values)
            yield nodes, band_hashes(values, params.bands)


def shingle_hashes(texts: Sequence[str], code: bool, params: DedupParams) -> tuple[Hashes, Counts]:
    """The hashed shingles of all texts in a row, and how many each text has."""
    parts = [
        grams(split_units([texts[place] for place in chunk], code), params.ngram)
        for chunk in batches(texts, np.arange(len(texts)), CHUNK_CHARACTERS)
    ]
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([counts for _, counts in parts])


def band_rows(nodes: Rows, hashes: Hashes, params: DedupParams) -> Rows:
    rows = np.zeros(hashes.shape, dtype=band_type(params))
    rows["hash"] = hashes
    for name in nodes.dtype.names or ():
        rows[name] = nodes[name][:, None]
    return rows.reshape(-1)


def near_partition(
    files: Sequence[Path], partition: int, partitions: int, edges: Path, nodes: Path, params: DedupParams
) -> int:
    """Link the documents of each bucket to the best document in it that they are like. Linear in the bucket."""
    rows = _that_met(read_partition(files, partition, partitions))
    rows = rows[sorted_by(rows, "hash", "rank", "gid")]
    leaders = follow(rows["hash"], rows["sketch"], params, BUCKET_LEADERS)
    linked = np.flatnonzero(leaders != np.arange(len(rows)))
    found = np.zeros(len(linked), dtype=EDGE)
    found["one"], found["other"] = rows["gid"][leaders[linked]], rows["gid"][linked]
    found = found[sorted_by(found, "one", "other")]
    found = found[group_starts(found)]
    ends = rows[np.union1d(linked, leaders[linked])]
    ends = ends[sorted_by(ends, "gid")]
    ends = ends[group_starts(ends["gid"])]
    node_rows = np.zeros(len(ends), dtype=node_type(params))
    for name in node_rows.dtype.names or ():
        node_rows[name] = ends[name]
    save_rows(edges, found)
    save_rows(nodes, node_rows)
    return len(found)


def _that_met(rows: Rows) -> Rows:
    """Rows that share their hash with another. Most do not, and need not be sorted and copied any further."""
    order = np.argsort(rows["hash"], kind="stable")
    starts = group_starts(rows["hash"][order])
    sizes = np.diff(starts, append=len(rows))
    return rows[order[np.repeat(sizes > 1, sizes)]]


def follow(groups: NDArray[np.generic], sketches: Sketches, params: DedupParams, most: int) -> NDArray[np.intp]:
    """For each row the row of its group that it is a near copy of, or itself.

    Rows come sorted by group, the best of each group first. The first row leads; rows like it follow it; the first of
    the others leads next. After ``most`` leaders the rest of a group is left alone, so that no group costs its square.
    """
    leaders = np.arange(len(groups))
    alive = leaders
    for _ in range(most):
        starts = group_starts(groups[alive])
        sizes = np.diff(starts, append=len(alive))
        lead = np.repeat(alive[starts], sizes)
        several = np.repeat(sizes, sizes) > 1
        behind = several & (lead != alive)
        alive, lead = alive[behind], lead[behind]
        if len(alive) == 0:
            break
        alike = similarity(sketches[alive], sketches[lead], params.slots) >= params.threshold - params.margin
        leaders[alive[alike]] = lead[alike]
        alive = alive[~alike]
    return leaders


def connected_components(edge_files: Sequence[Path], out: Path) -> int:
    """Give every linked document the number of its component. Only links are in memory, as integers."""
    edges = np.concatenate([np.zeros(0, dtype=EDGE), *(load_rows(path) for path in edge_files)])
    gids, numbers = np.unique(np.concatenate([edges["one"], edges["other"]]), return_inverse=True)
    ends = numbers.astype(np.int64)
    rows = np.zeros(len(gids), dtype=LABEL)
    rows["gid"] = gids
    rows["component"] = components(ends[: len(edges)], ends[len(edges) :], len(gids))
    save_rows(out, rows)
    return len(np.unique(rows["component"]))


def components(one: Counts, other: Counts, count: int) -> Counts:
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


def near_drops(
    node_files: Sequence[Path], labels: Path, partition: int, partitions: int, out: Path, params: DedupParams
) -> int:
    """In each component of the partition the best document stays, and what is like it goes; then the next best."""
    label_rows = load_rows(labels)
    parts = [np.zeros(0, dtype=node_type(params))]
    numbers = [np.zeros(0, dtype=np.int64)]
    for path in node_files:
        nodes = load_rows(path)
        component = label_rows["component"][np.searchsorted(label_rows["gid"], nodes["gid"])]
        chosen = np.flatnonzero(component % partitions == partition)
        parts.append(np.array(nodes[chosen]))
        numbers.append(component[chosen])
    nodes, component = np.concatenate(parts), np.concatenate(numbers)
    order = np.lexsort((nodes["gid"], nodes["rank"], component))
    order = order[group_starts(nodes["gid"][order])]  # a document has a row from each bucket that it met another in
    nodes, component = nodes[order], component[order]
    leaders = follow(component, nodes["sketch"], params, COMPONENT_LEADERS)
    copies = np.flatnonzero(leaders != np.arange(len(nodes)))
    drops = np.zeros(len(copies), dtype=DROP)
    drops["shard"], drops["gid"], drops["reason"] = nodes["shard"][copies], nodes["gid"][copies], NEAR
    drops["kept"] = nodes["gid"][leaders[copies]]
    save_sorted(out, drops, "shard", "gid")
    return len(drops)
