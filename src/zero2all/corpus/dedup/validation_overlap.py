"""Train documents that are near duplicates of validation documents: validation loss would measure memorized text.

Always searched for, even where near duplicates within the training data are kept. Only the validation split is
indexed, a hundredth of the corpus or less; every other document is signed, looked up in the index, and not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zero2all.corpus.dedup.drops import count_drops, write_drops
from zero2all.corpus.dedup.near import (
    MAX_BUCKET_LEADERS,
    band_dtype,
    band_rows,
    compute_signatures,
    node_dtype,
    remaining_mask,
)
from zero2all.corpus.dedup.shingles import Hashes, estimate_jaccard
from zero2all.corpus.dedup.shuffle import (
    LABEL_COLUMNS,
    DedupParams,
    Rows,
    argsort_by,
    gids_to_hex,
    group_starts,
    load_rows,
    read_columns,
    save_rows,
    save_sorted,
)
from zero2all.corpus.document import is_validation

NEAR_VALIDATION = "near copy of a validation document"


def _validation_mask(gids: Sequence[str], holdout: float) -> NDArray[np.bool_]:
    return np.array([is_validation(gid, holdout) for gid in gids], dtype=bool)


def write_validation_signatures(
    part: Path, drop_files: Sequence[Path], holdout: float, out: Path, params: DedupParams
) -> int:
    """Write the band rows of a part's validation documents, except those in its drop files."""
    dropped_counts = count_drops(drop_files)
    rows = [np.zeros(0, dtype=band_dtype(params))]
    for columns in read_columns(part, [*LABEL_COLUMNS, "content"]):
        wanted = remaining_mask(columns["gid"], dropped_counts) & _validation_mask(columns["gid"], holdout)
        rows += [band_rows(nodes, hashes, params) for nodes, hashes in compute_signatures(columns, wanted, 0, params)]
    save_sorted(out, np.concatenate(rows), "gid", "hash")
    return sum(map(len, rows)) // params.bands


def build_validation_index(files: Sequence[Path], out: Path, params: DedupParams) -> int:
    """All of them as one index: documents by gid, and their band hashes in order, each with its document's number."""
    rows = np.concatenate([np.zeros(0, dtype=band_dtype(params)), *map(load_rows, files)])
    rows = rows[argsort_by(rows, "gid", "hash")]
    starts = group_starts(rows["gid"])
    nodes = np.zeros(len(starts), dtype=node_dtype(params))
    for name in ("gid", "sketch"):
        nodes[name] = rows[name][starts]
    owners = np.repeat(np.arange(len(starts), dtype=np.uint32), np.diff(starts, append=len(rows)))
    order = np.lexsort((owners, rows["hash"]))
    save_rows(out / "nodes.npy", nodes)
    save_rows(out / "hashes.npy", rows["hash"][order])
    save_rows(out / "owners.npy", owners[order])
    return len(nodes)


def write_validation_drops(
    part: Path, drop_files: Sequence[Path], holdout: float, index: Path, out: Path, params: DedupParams
) -> int:
    """Write which train documents of a part are near duplicates of a validation document, and of which."""
    nodes, hashes, owners = (load_rows(index / f"{name}.npy") for name in ("nodes", "hashes", "owners"))
    dropped_counts = count_drops(drop_files)
    gids: list[str] = []
    kept: list[str] = []
    for columns in read_columns(part, [*LABEL_COLUMNS, "content"]):
        wanted = remaining_mask(columns["gid"], dropped_counts) & ~_validation_mask(columns["gid"], holdout)
        for train, bands in compute_signatures(columns, wanted, 0, params):
            like = _first_near_duplicate(train, bands, nodes, hashes, owners, params)
            duplicates = np.flatnonzero(like < len(nodes))
            gids += gids_to_hex(train["gid"][duplicates])
            kept += gids_to_hex(nodes["gid"][like[duplicates]])
    write_drops(out, gids, kept, [NEAR_VALIDATION] * len(gids))
    return len(gids)


def _first_near_duplicate(
    train: Rows, bands: Hashes, nodes: Rows, hashes: Hashes, owners: NDArray[np.uint32], params: DedupParams
) -> NDArray[np.intp]:
    """For each document the number of the first validation document that it is similar to; ``len(nodes)`` if none.

    Of a bucket that many validation documents share only the first few are compared, which bounds its cost.
    """
    like = np.full(len(train), len(nodes), dtype=np.intp)
    first = np.searchsorted(hashes, bands)
    for step in range(MAX_BUCKET_LEADERS):
        inside = first + step < len(hashes)
        places = np.where(inside, first + step, 0)
        met = inside & (hashes[places] == bands) if len(hashes) else inside
        documents, band = np.nonzero(met)
        if len(documents) == 0:
            break
        others = owners[places[documents, band]].astype(np.intp)
        estimate = estimate_jaccard(train["sketch"][documents], nodes["sketch"][others], params.slots)
        is_near = estimate >= params.threshold - params.margin
        np.minimum.at(like, documents[is_near], others[is_near])
    return like
