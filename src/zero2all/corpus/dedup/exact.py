"""Exact deduplication: documents that are equal up to case, width and white space."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zero2all.corpus.dedup.drops import DROP_DTYPE, EXACT
from zero2all.corpus.dedup.shuffle import (
    GID_DTYPE,
    LABEL_COLUMNS,
    DedupParams,
    argsort_by,
    document_labels,
    gids_to_bytes,
    group_starts,
    read_columns,
    read_partition,
    save_sorted,
)

KEY_DTYPE = np.dtype([("hash", "<u8"), ("more", "<u8"), ("gid", GID_DTYPE), ("rank", "<u2"), ("shard", "<u4")])

# Characters that never compose with a neighbour, so that each can be normalised alone: ASCII, common Han, and the
# punctuation and full-width forms that go with them. Nearly all Chinese text has nothing else.
SIMPLE_CHARACTERS = re.compile(r"[\x00-\x7f\u00b7\u2010-\u2029\u3000-\u3029\u4e00-\u9fff\uff01-\uff5e]*")
NFKC_REPLACEMENTS = {
    char: unicodedata.normalize("NFKC", char)
    for char in map(chr, (*range(0xFF01, 0xFF5F), *range(0x2010, 0x202A), *range(0x3000, 0x302A)))
    if unicodedata.normalize("NFKC", char) != char
}


def nfkc(text: str) -> str:
    """``unicodedata.normalize("NFKC", text)``, which alone would take most of the time on Chinese."""
    if text.isascii() or not SIMPLE_CHARACTERS.fullmatch(text):
        return unicodedata.normalize("NFKC", text)
    for char, form in NFKC_REPLACEMENTS.items():
        text = text.replace(char, form)
    return text


def normalize_for_comparison(text: str, *, code: bool) -> str:
    """What two equal documents have in common. In code whitespace is significant; only line ends are unified."""
    if code:
        return text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(nfkc(text).casefold().split())


def write_exact_keys(shard: Path, number: int, out: Path, params: DedupParams) -> int:
    """Write a row for each document of the shard, sorted by hash. ``number`` identifies the shard in later steps."""
    parts = []
    for columns in read_columns(shard, [*LABEL_COLUMNS, "content"]):
        rows = np.zeros(len(columns["gid"]), dtype=KEY_DTYPE)
        priorities, codes = document_labels(columns, params)
        digests = b"".join(map(_digest, columns["content"], codes))
        rows["hash"], rows["more"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T
        rows["gid"], rows["rank"], rows["shard"] = gids_to_bytes(columns["gid"]), priorities, number
        parts.append(rows)
    rows = np.concatenate([np.zeros(0, dtype=KEY_DTYPE), *parts])
    save_sorted(out, rows, "hash", "more", "rank", "gid")
    return len(rows)


def _digest(text: str, code: bool) -> bytes:
    return hashlib.blake2b(
        normalize_for_comparison(text, code=code).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


def write_exact_drops(files: Sequence[Path], partition: int, partitions: int, out: Path) -> int:
    """Keep, among equal documents, the best source's, then the smallest gid; write the others as drops."""
    rows = read_partition(files, partition, partitions)
    rows = rows[argsort_by(rows, "hash", "more", "rank", "gid")]
    starts = group_starts(rows[["hash", "more"]])
    first = np.repeat(starts, np.diff(starts, append=len(rows)))
    duplicates = np.flatnonzero(first != np.arange(len(rows)))
    drops = np.zeros(len(duplicates), dtype=DROP_DTYPE)
    drops["shard"], drops["gid"], drops["reason"] = rows["shard"][duplicates], rows["gid"][duplicates], EXACT
    drops["kept"] = rows["gid"][first[duplicates]]
    save_sorted(out, drops, "shard", "gid")
    return len(drops)
