"""``z2a tokens build``: document shards to token shards, one to one, each published only when checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from zero2all.console import progress
from zero2all.errors import Z2aError
from zero2all.io import MANIFEST, fingerprint, read_json, read_manifest, sha256_file, write_json, write_manifest
from zero2all.recipe import TokensRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens.store import KIND, DocumentName, ShardWriter
from zero2all.units import show_bytes

FORMAT = 1
SUFFIXES = (".bin", ".idx", ".docs.arrow")
BATCH_DOCUMENTS = 256


def build_tokens(recipe: TokensRecipe, documents: Path, tokenizer_dir: Path, out: Path) -> dict[str, Any]:
    """Encode both splits of ``documents`` into ``out``. A shard whose input and tokenizer are unchanged is kept."""
    corpus = read_manifest(documents, "documents", "z2a corpus build RECIPE")
    tokenizer = Tokenizer(tokenizer_dir)
    splits: dict[str, Any] = {}
    reused = True
    wanted: set[Path] = set()
    with progress(f"encoding {show_bytes(corpus['bytes'])}", corpus["bytes"]) as advance:
        for split, sources in corpus["splits"].items():
            (out / split).mkdir(parents=True, exist_ok=True)
            splits[split] = {}
            for source, part in sources.items():
                records = []
                for shard in part["shards"]:
                    name = f"{split}/{shard}"
                    key = fingerprint([FORMAT, corpus["files"][name], tokenizer.fingerprint, recipe.verify])
                    stem = out / split / Path(shard).stem
                    wanted |= {stem.with_suffix(suffix) for suffix in (*SUFFIXES, ".json")}
                    record = _finished(stem, key)
                    if record is None:
                        reused = False
                        # From here on the store is not what its manifest says, so it has none until all is done.
                        (out / MANIFEST).unlink(missing_ok=True)
                        record = _encode_shard(documents / name, stem, key, tokenizer, recipe.verify, advance)
                    else:
                        advance(record["bytes"])
                    records.append(record)
                splits[split][source] = {
                    "documents": sum(record["documents"] for record in records),
                    "tokens": sum(record["tokens"] for record in records),
                    "bytes": sum(record["bytes"] for record in records),
                    "shards": [record["shard"] for record in records],
                    "shard_tokens": [record["tokens"] for record in records],
                    "sha256": [record["files"][".bin"] for record in records],
                }
    body = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "documents_key": corpus["key"],
        "splits": splits,
        "tokens": sum(part["tokens"] for sources in splits.values() for part in sources.values()),
        "bytes": sum(part["bytes"] for sources in splits.values() for part in sources.values()),
    }
    for split in splits:
        for path in (out / split).iterdir():
            if path not in wanted:  # of a source that is gone, or half-written by a killed process
                path.unlink()
    write_manifest(out, KIND, body)
    return {"kind": KIND, **body, "reused": reused}


def _finished(stem: Path, key: str) -> dict[str, Any] | None:
    """The record of a shard that is done: it is written last, and only counts while its files match it."""
    path = stem.with_suffix(".json")
    if not path.exists():
        return None
    record: dict[str, Any] = read_json(path)
    files = record["files"].items()
    same = all(
        stem.with_suffix(suffix).exists() and sha256_file(stem.with_suffix(suffix)) == digest
        for suffix, digest in files
    )
    return record if record["key"] == key and same else None


def _encode_shard(
    parquet: Path, stem: Path, key: str, tokenizer: Tokenizer, verify: float, advance: Callable[[float], None]
) -> dict[str, Any]:
    partial = stem.with_name(f".{stem.name}-partial")
    record: dict[str, Any] = {
        "shard": stem.name,
        "key": key,
        "documents": 0,
        "tokens": 0,
        "bytes": 0,
        "verified": 0,
    }
    with ShardWriter(partial, tokenizer.vocab_size) as writer, pq.ParquetFile(parquet) as table:
        for batch in table.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["gid", "data_src", "title", "content"]):
            rows = batch.to_pylist()
            encoded = tokenizer.encode_batch([row["content"] for row in rows])
            documents = []
            for row, ids in zip(rows, encoded, strict=True):
                if record["documents"] == 0 or int(row["gid"][:6], 16) < verify * 2**24:
                    _check(row["gid"], row["content"], ids, tokenizer)
                    record["verified"] += 1
                size = len(row["content"].encode())
                name = DocumentName(row["gid"], row["data_src"], row["title"], size)
                documents.append((name, [*ids, tokenizer.end_of_text]))
                record["documents"] += 1
                record["tokens"] += len(ids) + 1
                record["bytes"] += size
                advance(size)
            writer.write(documents)
    for suffix in SUFFIXES:
        partial.with_suffix(suffix).replace(stem.with_suffix(suffix))
    record["files"] = {suffix: sha256_file(stem.with_suffix(suffix)) for suffix in SUFFIXES}
    write_json(stem.with_suffix(".json"), record)
    return record


def _check(gid: str, text: str, ids: list[int], tokenizer: Tokenizer) -> None:
    """The batch path must give what the plain encoder gives, and the ids must give back the text."""
    if ids != tokenizer.encode(text):
        raise Z2aError(f"document {gid}: the batch encoder and the reference encoder disagree; nothing was published")
    if tokenizer.decode(ids) != text:
        raise Z2aError(f"document {gid}: decoding does not give back its text; nothing was published")
