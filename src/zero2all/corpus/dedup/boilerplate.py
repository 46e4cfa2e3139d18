"""Lines that many documents of a source share (footers, notices, navigation), and a step that removes them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.corpus.dedup.shuffle import argsort_by, group_starts, load_rows, read_columns, read_partition, save_sorted
from zero2all.corpus.document import SCHEMA, is_labeled_as_code
from zero2all.errors import UsageError
from zero2all.io import atomic_path
from zero2all.paths import arrow_source

LINE_DTYPE = np.dtype([("hash", "<u8"), ("source", "<u8"), ("documents", "<u4")])


@dataclass(frozen=True)
class BoilerplateParams:
    min_characters: int = 15
    """Shorter lines (a bracket, a heading such as "See also") carry too little to be judged."""
    min_documents: int = 10
    """A line in no more documents of a source than this is not boilerplate,"""
    min_share: float = 0.05
    """nor is one in no more than this share of them."""

    def __post_init__(self) -> None:
        if self.min_characters < 1 or self.min_documents < 1 or not 0 <= self.min_share < 1:
            raise UsageError("boilerplate lines need min_characters and min_documents >= 1 and 0 <= min_share < 1")


def count_lines(shard: Path, out: Path, params: BoilerplateParams) -> dict[str, int]:
    """Write in how many documents each line occurs, by source. Returns the number of prose documents of each source."""
    seen: Counter[tuple[bytes, bytes]] = Counter()
    documents: Counter[str] = Counter()
    for columns in read_columns(shard, ["data_src", "category", "title", "others", "content"]):
        for source, category, title, others, content in zip(*columns.values(), strict=True):
            if is_labeled_as_code(category, title, others):
                continue
            documents[source] += 1
            owner = _hash(source)
            seen.update(
                {(_hash(line), owner) for line in _normalized_lines(content) if len(line) > params.min_characters}
            )
    rows = np.zeros(len(seen), dtype=LINE_DTYPE)
    keys = np.frombuffer(b"".join(line + source for line, source in seen), dtype="<u8").reshape(-1, 2)
    rows["hash"], rows["source"], rows["documents"] = keys[:, 0], keys[:, 1], list(seen.values())
    save_sorted(out, rows, "hash", "source")
    return dict(documents)


def write_boilerplate_lines(
    files: Sequence[Path],
    partition: int,
    partitions: int,
    documents: Mapping[str, int],
    out: Path,
    params: BoilerplateParams,
) -> int:
    """Write the lines that too many documents of one source share. ``documents`` counts those of each source."""
    rows = read_partition(files, partition, partitions)
    rows = rows[argsort_by(rows, "hash", "source")]
    starts = group_starts(rows[["hash", "source"]])
    totals = rows[starts]
    totals["documents"] = np.add.reduceat(rows["documents"], starts) if len(starts) else 0
    enough = np.zeros(len(totals), dtype=bool)
    for source, count in documents.items():
        least = max(params.min_documents, params.min_share * count)
        enough |= (totals["source"] == _hash_as_int(source)) & (totals["documents"] > least)
    save_sorted(out, totals[enough], "hash", "source")
    return int(enough.sum())


def strip_boilerplate(
    shard_in: Path, boilerplate: Sequence[Path], shard_out: Path, params: BoilerplateParams
) -> dict[str, int]:
    """Copy a shard without the boilerplate lines of its sources; a document with nothing else in it is dropped.

    The gid stays: it names the document as it arrived.
    """
    known = {(row["hash"].tobytes(), row["source"].tobytes()) for path in boilerplate for row in load_rows(path)}
    counts = {"documents_in": 0, "documents_out": 0, "documents_changed": 0, "lines": 0, "characters": 0}
    with (
        atomic_path(shard_out) as partial,
        pq.ParquetFile(arrow_source(shard_in)) as source_file,
        pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer,
    ):
        for number in range(source_file.num_row_groups):
            kept = []
            for row in source_file.read_row_group(number).to_pylist():
                counts["documents_in"] += 1
                if not is_labeled_as_code(row["category"], row["title"], row["others"]):
                    row["content"] = _strip_lines(row["content"], _hash(row["data_src"]), known, params, counts)
                if row["content"].strip():
                    kept.append(row)
            counts["documents_out"] += len(kept)
            writer.write_table(pa.Table.from_pylist(kept, schema=SCHEMA))
    return counts


def _strip_lines(
    content: str, source: bytes, known: set[tuple[bytes, bytes]], params: BoilerplateParams, counts: dict[str, int]
) -> str:
    kept = []
    removed = 0
    for raw, line in zip(content.split("\n"), _normalized_lines(content), strict=True):
        if len(line) > params.min_characters and (_hash(line), source) in known:
            removed += 1
            counts["characters"] += len(raw)
        else:
            kept.append(raw)
    if not removed:
        return content
    counts["lines"] += removed
    counts["documents_changed"] += 1
    return "\n".join(kept)


def _normalized_lines(content: str) -> list[str]:
    return [" ".join(line.split()) for line in content.split("\n")]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _hash_as_int(text: str) -> int:
    return int.from_bytes(_hash(text), "little")
