"""Which documents are dropped, why, and which duplicate is kept: one small Parquet file per shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.base.io import atomic_path
from zero2all.base.paths import arrow_source
from zero2all.corpus.dedup.shuffle import GID_DTYPE, Rows, argsort_by, gids_to_hex, rows_between

DROP_DTYPE = np.dtype([("shard", "<u4"), ("gid", GID_DTYPE), ("kept", GID_DTYPE), ("reason", "u1")])
EXACT, NEAR = 0, 1
DROP_REASONS = ("exact copy", "near copy")
DROP_SCHEMA = pa.schema([("gid", pa.string()), ("kept", pa.string()), ("reason", pa.string())])


def read_shard_rows(files: Sequence[Path], number: int) -> Rows:
    """The drops of one shard. The files are sorted by shard, so only its range of each is read."""
    parts = [np.zeros(0, dtype=DROP_DTYPE)]
    for path in files:
        parts.append(rows_between(path, "shard", number, number))
    return np.concatenate(parts)


def collect_shard_drops(files: Sequence[Path], number: int, out: Path) -> dict[str, int]:
    """Collect a shard's drops from all partitions into one file, sorted by gid.

    The document kept for an exact duplicate may itself be dropped as a near duplicate; its own row names the kept one.
    """
    rows = read_shard_rows(files, number)
    rows = rows[argsort_by(rows, "gid")]
    reasons = [DROP_REASONS[reason] for reason in rows["reason"].tolist()]
    write_drops(out, gids_to_hex(rows["gid"]), gids_to_hex(rows["kept"]), reasons)
    return {reason: reasons.count(reason) for reason in DROP_REASONS}


def write_drops(out: Path, gids: list[str], kept: list[str], reasons: list[str]) -> None:
    table = pa.table([gids, kept, reasons], schema=DROP_SCHEMA)
    with atomic_path(out) as partial:
        pq.write_table(table, partial, compression="zstd")


def read_drops(files: Sequence[Path]) -> dict[str, list[str]]:
    """Reasons by gid, one per dropped duplicate: a record that occurs twice has one gid, and one of the two is kept."""
    drops: dict[str, list[str]] = {}
    for path in files:
        table = pq.read_table(arrow_source(path), columns=["gid", "reason"])
        for gid, reason in zip(table["gid"].to_pylist(), table["reason"].to_pylist(), strict=True):
            drops.setdefault(gid, []).append(reason)
    return drops


def count_drops(files: Sequence[Path]) -> Counter[str]:
    """How often each gid is dropped."""
    return Counter({gid: len(reasons) for gid, reasons in read_drops(files).items()})
