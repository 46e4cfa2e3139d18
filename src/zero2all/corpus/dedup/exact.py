"""Exact deduplication: documents that are equal once case, width and white space are set aside."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zero2all.corpus.dedup.drops import DROP, EXACT
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.shuffle import (
    GID,
    LABELS,
    gids_of,
    group_starts,
    labels_of,
    read_columns,
    read_partition,
    save_sorted,
    sorted_by,
)

KEY = np.dtype([("hash", "<u8"), ("more", "<u8"), ("gid", GID), ("rank", "<u2"), ("shard", "<u4")])

# Characters that never melt into a neighbour, so that each can be normalised by itself: ASCII, common Han, and the
# punctuation and full-width forms that go with them. Nearly all Chinese text has nothing else.
PLAIN = re.compile(r"[\x00-\x7f\u00b7\u2010-\u2029\u3000-\u3029\u4e00-\u9fff\uff01-\uff5e]*")
PLAIN_FORMS = {
    char: unicodedata.normalize("NFKC", char)
    for char in map(chr, (*range(0xFF01, 0xFF5F), *range(0x2010, 0x202A), *range(0x3000, 0x302A)))
    if unicodedata.normalize("NFKC", char) != char
}


def nfkc(text: str) -> str:
    """``unicodedata.normalize("NFKC", text)``, which alone would take most of the time on Chinese."""
    if text.isascii() or not PLAIN.fullmatch(text):
        return unicodedata.normalize("NFKC", text)
    for char, form in PLAIN_FORMS.items():
        text = text.replace(char, form)
    return text


def normalised(text: str, code: bool) -> str:
    """What two equal documents have in common. In code every space counts; only the line ends are made one kind."""
    if code:
        return text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(nfkc(text).casefold().split())


def exact_keys(shard: Path, number: int, out: Path, params: DedupParams) -> int:
    """Write a row for each document of the shard, sorted by hash. ``number`` tells later steps where it came from."""
    parts = []
    for columns in read_columns(shard, [*LABELS, "content"]):
        rows = np.zeros(len(columns["gid"]), dtype=KEY)
        ranks, codes = labels_of(columns, params)
        digests = b"".join(map(_digest, columns["content"], codes))
        rows["hash"], rows["more"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T
        rows["gid"], rows["rank"], rows["shard"] = gids_of(columns["gid"]), ranks, number
        parts.append(rows)
    rows = np.concatenate([np.zeros(0, dtype=KEY), *parts])
    save_sorted(out, rows, "hash", "more", "rank", "gid")
    return len(rows)


def _digest(text: str, code: bool) -> bytes:
    return hashlib.blake2b(normalised(text, code).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def exact_partition(files: Sequence[Path], partition: int, partitions: int, out: Path) -> int:
    """Of equal documents keep the one from the best source, then the smallest gid; write the others as drops."""
    rows = read_partition(files, partition, partitions)
    rows = rows[sorted_by(rows, "hash", "more", "rank", "gid")]
    starts = group_starts(rows[["hash", "more"]])
    first = np.repeat(starts, np.diff(starts, append=len(rows)))
    copies = np.flatnonzero(first != np.arange(len(rows)))
    drops = np.zeros(len(copies), dtype=DROP)
    drops["shard"], drops["gid"], drops["reason"] = rows["shard"][copies], rows["gid"][copies], EXACT
    drops["kept"] = rows["gid"][first[copies]]
    save_sorted(out, drops, "shard", "gid")
    return len(drops)
