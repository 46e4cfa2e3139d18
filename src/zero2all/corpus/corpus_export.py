"""``z2a corpus export``: documents as JSON lines or plain text, for tools that do not read Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.base.console import progress
from zero2all.base.io import MANIFEST, atomic_dir, atomic_path, fingerprint, read_json, sha256_file
from zero2all.base.manifest import is_current, read_documents_manifest, write_manifest
from zero2all.base.paths import arrow_source
from zero2all.base.records import parse_record
from zero2all.base.tasks import TaskEngine

KIND = "exported documents"
FORMAT = 1  # raised when the same documents and options give other files than before
ExportFormat = Literal["jsonl", "text"]
Compression = Literal["none", "gzip", "zstd"]
EXTENSIONS = {"jsonl": ".jsonl", "text": ".txt"}
COMPRESSION_EXTENSIONS = {"none": "", "gzip": ".gz", "zstd": ".zst"}


@dataclass(frozen=True)
class ExportOptions:
    """How documents are written."""

    format: ExportFormat = "jsonl"
    shard_size: int | None = None
    """Bytes in a file at most, before compression. None: a file for each shard of the documents."""
    compression: Compression = "none"


@dataclass(frozen=True)
class ExportManifest:
    """``manifest.json`` of an export, without the kind and version that every manifest begins with."""

    key: str
    documents: int
    bytes: int
    """The size of all files, before compression."""
    options: ExportOptions
    files: dict[str, str]
    """sha256 of every file."""


@dataclass(frozen=True)
class ExportedShard:
    """What one task wrote."""

    documents: int
    bytes: int
    files: dict[str, str]


def export_documents(
    documents: Path, out: Path, options: ExportOptions | None = None, engine: TaskEngine | None = None
) -> ExportManifest:
    """Write the documents of a corpus to ``out``, complete or not at all. An export that is up to date is kept."""
    options = options or ExportOptions()
    manifest = read_documents_manifest(documents)
    key = fingerprint([FORMAT, manifest.key, manifest.files, asdict(options)])
    if is_current(out, KIND, key):
        return parse_record(ExportManifest, read_json(out / MANIFEST), out / MANIFEST)
    shards = [
        (split, shard)
        for split, sources in manifest.splits.items()
        for source in sources.values()
        for shard in source.shards
    ]
    with atomic_dir(out, KIND) as partial, progress("exporting documents", len(shards)) as advance:
        tasks = [(documents, split, shard, partial, options) for split, shard in shards]
        written = (engine or TaskEngine()).run(write_export, tasks, lambda task: advance(1))
        exported = ExportManifest(
            key=key,
            documents=sum(shard.documents for shard in written),
            bytes=sum(shard.bytes for shard in written),
            options=options,
            files={name: digest for shard in written for name, digest in shard.files.items()},
        )
        write_manifest(partial, KIND, asdict(exported))
    return exported


def write_export(documents: Path, split: str, shard: str, out: Path, options: ExportOptions) -> ExportedShard:
    """Write a shard as one file of its name, or as several: ``<name>.jsonl``, ``<name>.1.jsonl`` …"""
    files: dict[str, str] = {}
    count = size = 0
    texts = _encode_documents(documents / split / shard, options.format)
    for number, numbered in groupby(_number_files(texts, options.shard_size), itemgetter(0)):
        stem = Path(shard).stem + (f".{number}" if number else "")
        name = f"{split}/{stem}{EXTENSIONS[options.format]}{COMPRESSION_EXTENSIONS[options.compression]}"
        with atomic_path(out / name) as partial, _open_output(partial, options.compression) as stream:
            for _, text in numbered:
                stream.write(text)
                count, size = count + 1, size + len(text)
        files[name] = sha256_file(out / name)
    return ExportedShard(count, size, files)


def _number_files(texts: Iterator[bytes], size: int | None) -> Iterator[tuple[int, bytes]]:
    """Each text with the number of the file it goes to."""
    number = used = 0
    for text in texts:
        if size is not None and used and used + len(text) > size:
            number, used = number + 1, 0
        used += len(text)
        yield number, text


def _open_output(path: Path, compression: Compression) -> AbstractContextManager[Any]:
    return open(path, "wb") if compression == "none" else pa.CompressedOutputStream(str(path), compression)


def _encode_documents(shard: Path, export_format: ExportFormat) -> Iterator[bytes]:
    columns = ["content"] if export_format == "text" else None
    with pq.ParquetFile(arrow_source(shard)) as table:
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for document in batch.to_pylist():
                yield _plain_text(document["content"]) if export_format == "text" else _json_line(document)


def _plain_text(content: str) -> bytes:
    """With a blank line after it."""
    return f"{content}\n".encode() if content.endswith("\n") else f"{content}\n\n".encode()


def _json_line(document: dict[str, str]) -> bytes:
    """``others`` as an object; JSON has no NaN, which Python writes and reads."""
    others = json.loads(document["others"], parse_constant=lambda name: None) if document["others"] else {}
    return json.dumps({**document, "others": others}, ensure_ascii=False, allow_nan=False).encode() + b"\n"
