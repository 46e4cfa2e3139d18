"""Train documents that are near copies of validation documents: loss on the validation split would be remembered text.

Always looked for, also where near copies within the training data stay. Only the validation split is indexed, which is
a hundredth of the corpus or less; every other document is signed where it lies, asked for in the index, and forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zero2all.corpus.dedup.drops import read_drops, write_drops
from zero2all.corpus.dedup.near import BUCKET_LEADERS, band_rows, band_type, node_type, signed, still_there
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.shingles import Hashes
from zero2all.corpus.dedup.shuffle import (
    LABELS,
    Rows,
    gid_texts,
    group_starts,
    load_rows,
    read_columns,
    save_rows,
    save_sorted,
    sorted_by,
)
from zero2all.corpus.dedup.sketch import similarity
from zero2all.corpus.document import is_held_out

NEAR_VALIDATION = "near copy of a validation document"


def _gone(drop_files: Sequence[Path]) -> Counter[str]:
    return Counter({gid: len(reasons) for gid, reasons in read_drops(drop_files).items()})


def _held_out(gids: Sequence[str], holdout: float) -> NDArray[np.bool_]:
    return np.array([is_held_out(gid, holdout) for gid in gids], dtype=bool)


def sign_validation(part: Path, drop_files: Sequence[Path], holdout: float, out: Path, params: DedupParams) -> int:
    """Write the band rows of a part's validation documents, but those that its drop files name."""
    gone = _gone(drop_files)
    rows = [np.zeros(0, dtype=band_type(params))]
    for columns in read_columns(part, [*LABELS, "content"]):
        wanted = still_there(columns["gid"], gone) & _held_out(columns["gid"], holdout)
        rows += [band_rows(nodes, hashes, params) for nodes, hashes in signed(columns, wanted, 0, params)]
    save_sorted(out, np.concatenate(rows), "gid", "hash")
    return sum(map(len, rows)) // params.bands


def index_validation(files: Sequence[Path], out: Path, params: DedupParams) -> int:
    """All of them as one index: documents by gid, and their band hashes in order, each with its document's number."""
    rows = np.concatenate([np.zeros(0, dtype=band_type(params)), *map(load_rows, files)])
    rows = rows[sorted_by(rows, "gid", "hash")]
    starts = group_starts(rows["gid"])
    nodes = np.zeros(len(starts), dtype=node_type(params))
    for name in ("gid", "sketch"):
        nodes[name] = rows[name][starts]
    owners = np.repeat(np.arange(len(starts), dtype=np.uint32), np.diff(starts, append=len(rows)))
    order = np.lexsort((owners, rows["hash"]))
    save_rows(out / "nodes.npy", nodes)
    save_rows(out / "hashes.npy", rows["hash"][order])
    save_rows(out / "owners.npy", owners[order])
    return len(nodes)


def validation_drops(
    part: Path, drop_files: Sequence[Path], holdout: float, index: Path, out: Path, params: DedupParams
) -> int:
    """Write which train documents of a part are near copies of a validation document, and of which."""
    nodes, hashes, owners = (load_rows(index / f"{name}.npy") for name in ("nodes", "hashes", "owners"))
    gone = _gone(drop_files)
    gids: list[str] = []
    kept: list[str] = []
    for columns in read_columns(part, [*LABELS, "content"]):
        wanted = still_there(columns["gid"], gone) & ~_held_out(columns["gid"], holdout)
        for train, bands in signed(columns, wanted, 0, params):
            like = _first_like(train, bands, nodes, hashes, owners, params)
            copies = np.flatnonzero(like < len(nodes))
            gids += gid_texts(train["gid"][copies])
            kept += gid_texts(nodes["gid"][like[copies]])
    write_drops(out, gids, kept, [NEAR_VALIDATION] * len(gids))
    return len(gids)


def _first_like(
    train: Rows, bands: Hashes, nodes: Rows, hashes: Hashes, owners: NDArray[np.uint32], params: DedupParams
) -> NDArray[np.intp]:
    """For each document the number of the first validation document that it is like; past the last if there is none.

    Of a bucket that many validation documents share the first few are asked, so that none costs its length.
    """
    like = np.full(len(train), len(nodes), dtype=np.intp)
    first = np.searchsorted(hashes, bands)
    for step in range(BUCKET_LEADERS):
        inside = first + step < len(hashes)
        places = np.where(inside, first + step, 0)
        met = inside & (hashes[places] == bands) if len(hashes) else inside
        documents, band = np.nonzero(met)
        if len(documents) == 0:
            break
        others = owners[places[documents, band]].astype(np.intp)
        estimate = similarity(train["sketch"][documents], nodes["sketch"][others], params.slots)
        alike = estimate >= params.threshold - params.margin
        np.minimum.at(like, documents[alike], others[alike])
    return like
