"""``z2a corpus build``: every source to its own Parquet shards, split by the hash of the gid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.console import progress, warn
from zero2all.corpus.document import SCHEMA, Document, to_document
from zero2all.corpus.readers import BrokenRecord, RawFile, Unreadable, WholeFile, list_files, read_records
from zero2all.errors import UsageError, Z2aError
from zero2all.io import atomic_dir, checksums, fingerprint, is_current, read_json, write_manifest
from zero2all.recipe import CorpusRecipe, SourceRecipe
from zero2all.units import show_bytes

KIND = "documents"
FORMAT = 1
ROW_GROUP_BYTES = 8_000_000
NAMES_KEPT = 20  # of skipped files, per reason, in the manifest


def build_corpus(recipe: CorpusRecipe, out: Path) -> dict[str, Any]:
    """Read every source of the recipe into ``out`` and return its manifest. Unchanged inputs are not read again."""
    if not recipe.sources:
        raise UsageError("the recipe names no text: add corpus.sources, each with a name and paths")
    files = {source.name: list_files(source) for source in recipe.sources}
    key = _key(recipe, files)
    if is_current(out, KIND, key):
        manifest: dict[str, Any] = read_json(out / "manifest.json")
        return {**manifest, "reused": True}

    seen: set[bytes] = set()
    body: dict[str, Any] = {
        "key": key,
        "format": FORMAT,
        "splits": {"train": {}, "valid": {}},
        "left_out": {},
    }
    total = sum(file.bytes for of_source in files.values() for file in of_source)
    with atomic_dir(out, KIND) as partial, progress(f"reading {show_bytes(total)}", total) as advance:
        for source in recipe.sources:
            left_out = LeftOut()
            with (
                ShardWriter(partial / "train", source.name, recipe.shard_size) as train,
                ShardWriter(partial / "valid", source.name, recipe.shard_size) as valid,
            ):
                for file in files[source.name]:
                    for document in _documents(file, source, left_out):
                        digest = bytes.fromhex(document.gid)
                        if digest in seen:
                            left_out.documents["the same record twice"] += 1
                            continue
                        seen.add(digest)
                        (valid if is_held_out(document.gid, recipe.holdout) else train).write(document)
                    advance(file.bytes)
            body["splits"]["train"][source.name] = train.summary()
            body["splits"]["valid"][source.name] = valid.summary()
            body["left_out"][source.name] = left_out.summary()
            if not train.documents:
                warn(f"corpus source {source.name!r} gave no documents; see left_out in {out}/manifest.json")
        body["documents"] = len(seen)
        body["bytes"] = sum(part["bytes"] for split in body["splits"].values() for part in split.values())
        if not seen:
            raise Z2aError(f"no document found in {total} bytes: {body['left_out']}")
        body["files"] = checksums(partial)
        write_manifest(partial, KIND, body)
    return {"kind": KIND, **body, "reused": False}


def is_held_out(gid: str, share: float) -> bool:
    """By the document itself, so that growing a corpus never moves a document across the split."""
    return int(gid[:12], 16) < share * 2**48


def _key(recipe: CorpusRecipe, files: dict[str, list[RawFile]]) -> str:
    stamps = {
        name: [(file.name, file.bytes, file.modified_ns) for file in of_source] for name, of_source in files.items()
    }
    return fingerprint([FORMAT, recipe.model_dump(mode="json", exclude={"dir"}), stamps])


class LeftOut:
    """What was not taken, and why."""

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()
        self.files: dict[str, list[str]] = {}

    def summary(self) -> dict[str, Any]:
        counted = {reason: {"count": len(names), "first": names[:NAMES_KEPT]} for reason, names in self.files.items()}
        return {"documents": dict(self.documents), "files": counted}


def _documents(file: RawFile, source: SourceRecipe, left_out: LeftOut) -> Iterator[Document]:
    try:
        for number, record in enumerate(read_records(file)):
            if isinstance(record, BrokenRecord):
                left_out.documents["broken record"] += 1
                continue
            fields = None if isinstance(record, WholeFile) else source.fields
            document = to_document(record, source.name, f"{file.name}#{number}", source.category, fields)
            if document is None:
                left_out.documents["no text in it"] += 1
            else:
                yield document
    except Unreadable as reason:
        left_out.files.setdefault(str(reason), []).append(file.name)


class ShardWriter:
    """Appends documents to Parquet shards of about ``shard_size`` text bytes, named <source>-00000.parquet."""

    def __init__(self, directory: Path, source: str, shard_size: int) -> None:
        self.directory, self.source, self.shard_size = directory, source, shard_size
        self.documents = self.bytes = 0
        self.shards: list[str] = []
        self._rows: list[dict[str, str]] = []
        self._row_bytes = self._shard_bytes = 0
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> ShardWriter:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_shard()

    def write(self, document: Document) -> None:
        size = len(document.content.encode())
        if self._shard_bytes and self._shard_bytes + size > self.shard_size:
            self._close_shard()
        self._rows.append(asdict(document))
        self._row_bytes += size
        self._shard_bytes += size
        self.documents += 1
        self.bytes += size
        if self._row_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            name = f"{self.source}-{len(self.shards):05}.parquet"
            self.shards.append(name)
            self._writer = pq.ParquetWriter(self.directory / name, SCHEMA, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._row_bytes = [], 0

    def _close_shard(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
        self._writer, self._shard_bytes = None, 0

    def summary(self) -> dict[str, Any]:
        return {"documents": self.documents, "bytes": self.bytes, "shards": self.shards}
