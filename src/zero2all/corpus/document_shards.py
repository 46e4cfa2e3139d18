"""The last stage: cleaned parts of a source to its published shards, without the duplicates, split by gid."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.base.io import atomic_path, sha256_file
from zero2all.base.manifest import sampled_digest
from zero2all.base.paths import RemotePath, arrow_source
from zero2all.corpus.dedup.drops import read_drops
from zero2all.corpus.document import Document, is_validation
from zero2all.corpus.ingest import count_drop
from zero2all.corpus.manifest import SPLITS, DroppedDocuments, SplitShards
from zero2all.corpus.part_files import DocumentWriter, PartFile


@dataclass(frozen=True)
class WrittenShards:
    """What one task wrote."""

    source: str
    splits: dict[str, SplitShards]
    dropped: dict[str, DroppedDocuments]
    files: dict[str, str]
    """sha256 of every shard."""
    samples: dict[str, str]
    """Hash of some blocks of every shard."""


def group_parts_by_size(parts: list[PartFile], shard_size: int) -> list[list[PartFile]]:
    """Parts in order, in groups of about one shard each: one task per group."""
    groups: list[list[PartFile]] = []
    size = 0
    for part in parts:
        if not groups or size + part.record.bytes > shard_size:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.record.bytes
    return groups


def write_shards(
    source: str, name: str, parts: list[tuple[Path, Sequence[Path]]], out: Path, shard_size: int, holdout: float
) -> WrittenShards:
    """Write the documents of a group of parts, each except those in its drop files, for both splits.

    The shard is ``<name>.parquet``, and ``<name>-1`` … where there is more than fits in one.
    """
    writers = {split: DocumentShardWriter(out / split, name, shard_size) for split in SPLITS}
    dropped: dict[str, DroppedDocuments] = {}
    for part, drop_files in parts:
        drops = read_drops(drop_files)
        with pq.ParquetFile(arrow_source(part)) as table:
            for batch in table.iter_batches(batch_size=256):
                chosen: dict[str, list[int]] = {"train": [], "valid": []}
                for place, gid in enumerate(batch["gid"].to_pylist()):
                    if drops.get(gid):
                        document = Document(**batch.slice(place, 1).to_pylist()[0])
                        count_drop(dropped, document, drops[gid].pop())
                    else:
                        chosen["valid" if is_validation(gid, holdout) else "train"].append(place)
                for split, places in chosen.items():
                    writers[split].write(batch.take(pa.array(places, pa.int64())))
    splits: dict[str, SplitShards] = {}
    files: dict[str, str] = {}
    samples: dict[str, str] = {}
    for split, writer in writers.items():
        writer.close()
        splits[split] = SplitShards(writer.documents, writer.bytes, writer.shards)
        files |= {f"{split}/{shard}": sha256_file(out / split / shard) for shard in writer.shards}
        if not isinstance(out, RemotePath):
            samples |= {f"{split}/{shard}": sampled_digest(out / split / shard) for shard in writer.shards}
    return WrittenShards(source, splits, dropped, files, samples)


class DocumentShardWriter:
    """Appends documents to Parquet shards of about ``shard_size`` text bytes; no document, no shard."""

    def __init__(self, directory: Path, name: str, shard_size: int) -> None:
        self.directory, self.name, self.shard_size = directory, name, shard_size
        self.documents = self.bytes = 0
        self.shards: list[str] = []
        self._open = ExitStack()
        self._writer: DocumentWriter | None = None
        self._used = 0  # bytes of the shard that is being written

    def write(self, batch: pa.RecordBatch) -> None:
        sizes = pc.binary_length(batch["content"]).to_pylist()
        start = 0
        for place, size in enumerate(sizes):
            if self._used and self._used + size > self.shard_size:
                self._append(batch.slice(start, place - start))
                self.close()
                start = place
            self._used += size
        self._append(batch.slice(start))

    def _append(self, batch: pa.RecordBatch) -> None:
        if not len(batch):
            return
        if self._writer is None:
            shard = f"{self.name}-{len(self.shards)}.parquet" if self.shards else f"{self.name}.parquet"
            self.shards.append(shard)
            partial = self._open.enter_context(atomic_path(self.directory / shard))
            self._writer = self._open.enter_context(DocumentWriter(partial))
        self._writer.write(batch)

    def close(self) -> None:
        self._open.close()
        if self._writer is not None:
            self.documents += self._writer.documents
            self.bytes += self._writer.bytes
        self._writer, self._used = None, 0
