"""Which documents go, why, and for the sake of which other: one small Parquet file beside each shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.corpus.dedup.shuffle import GID, Rows, gid_texts, rows_between, sorted_by
from zero2all.io import atomic_path
from zero2all.paths import arrow_source

DROP = np.dtype([("shard", "<u4"), ("gid", GID), ("kept", GID), ("reason", "u1")])
EXACT, NEAR = 0, 1
REASONS = ("exact copy", "near copy")
DROP_SCHEMA = pa.schema([("gid", pa.string()), ("kept", pa.string()), ("reason", pa.string())])


def rows_of_shard(files: Sequence[Path], number: int) -> Rows:
    """The drops of one shard. The files are sorted by shard, so that only its part of each is read."""
    parts = [np.zeros(0, dtype=DROP)]
    for path in files:
        parts.append(rows_between(path, "shard", number, number))
    return np.concatenate(parts)


def shard_drops(files: Sequence[Path], number: int, out: Path) -> dict[str, int]:
    """Collect a shard's drops from all partitions into one file, sorted by gid.

    The copy that an exact copy was dropped for may itself be dropped as a near copy; its own row says of what.
    """
    rows = rows_of_shard(files, number)
    rows = rows[sorted_by(rows, "gid")]
    reasons = [REASONS[reason] for reason in rows["reason"].tolist()]
    write_drops(out, gid_texts(rows["gid"]), gid_texts(rows["kept"]), reasons)
    return {reason: reasons.count(reason) for reason in REASONS}


def write_drops(out: Path, gids: list[str], kept: list[str], reasons: list[str]) -> None:
    table = pa.table([gids, kept, reasons], schema=DROP_SCHEMA)
    with atomic_path(out) as partial:
        pq.write_table(table, partial, compression="zstd")


def read_drops(files: Sequence[Path]) -> dict[str, list[str]]:
    """Reasons by gid, one for each copy that goes: the same record twice has one gid, and one of the two stays."""
    drops: dict[str, list[str]] = {}
    for path in files:
        table = pq.read_table(arrow_source(path), columns=["gid", "reason"])
        for gid, reason in zip(table["gid"].to_pylist(), table["reason"].to_pylist(), strict=True):
            drops.setdefault(gid, []).append(reason)
    return drops
