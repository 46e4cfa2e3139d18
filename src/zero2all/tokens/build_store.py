"""``z2a tokens build``: document shards to token shards, one to one, each published only after verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.console import progress
from zero2all.engine import Engine
from zero2all.errors import Z2aError
from zero2all.io import (
    MANIFEST,
    fingerprint,
    read_documents_manifest,
    read_finished,
    read_json,
    refuse_strangers,
    sha256_file,
    write_json,
    write_manifest,
    write_record,
)
from zero2all.paths import arrow_source
from zero2all.recipe import TokensRecipe
from zero2all.records import DocumentsManifest
from zero2all.tokenizer import Ids, Tokenizer
from zero2all.tokens.manifest import BuiltStore, ShardChecksums, ShardRecord, SourceShards, StoreManifest
from zero2all.tokens.token_store import DOCS_SCHEMA, FORMAT, KIND, TokenShardWriter
from zero2all.tokens.verify import block_checksums
from zero2all.units import show_bytes

SUFFIXES = (".bin", ".idx", ".docs.arrow")
ENCODE_BATCH_DOCUMENTS = 256


def build_tokens(
    recipe: TokensRecipe,
    documents: Path,
    tokenizer_dir: Path,
    out: Path,
    engine: Engine | None = None,
    before_replace: Callable[[], None] = lambda: None,
) -> BuiltStore:
    """Encode both splits of ``documents`` into ``out``. A shard whose input and tokenizer are unchanged is kept.

    ``before_replace`` is called before the tokens in ``out`` are replaced by others, and may raise.
    """
    engine = engine or Engine()
    corpus = read_documents_manifest(documents)
    tokenizer = Tokenizer(tokenizer_dir)
    shards = [
        (split, source, shard)
        for split, sources in corpus.splits.items()
        for source, entry in sources.items()
        for shard in entry.shards
    ]
    stems = [out / split / Path(shard).stem for split, _, shard in shards]
    keys = [
        fingerprint([FORMAT, corpus.files[f"{split}/{shard}"], tokenizer.fingerprint, recipe.verify])
        for split, _, shard in shards
    ]
    refuse_strangers(out, KIND)
    records: dict[int, ShardRecord] = {}
    for number, (stem, key) in enumerate(zip(stems, keys, strict=True)):
        if (record := _read_finished_record(stem, key)) is not None:
            records[number] = record
    todo = [number for number in range(len(shards)) if number not in records]
    if _has_other_tokens(out, corpus, tokenizer, set(stems), bool(todo)):
        before_replace()
    if todo:
        # From here on the old manifest no longer describes the store.
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / MANIFEST, {"kind": KIND, "unfinished": True})
    for split in corpus.splits:
        (out / split).mkdir(parents=True, exist_ok=True)
    with progress(f"encoding {show_bytes(corpus.bytes)}", corpus.bytes) as advance:
        advance(sum(record.bytes for record in records.values()))
        tasks = [
            (
                documents / shards[number][0] / shards[number][2],
                stems[number],
                keys[number],
                tokenizer_dir,
                recipe.verify,
            )
            for number in todo
        ]
        if engine.in_process:
            encoded = engine.run(partial(_encode_shard, advance=advance), tasks)
        else:
            remaining = corpus.bytes - sum(record.bytes for record in records.values())
            encoded = engine.run(_encode_shard, tasks, lambda task: advance(remaining / len(tasks)))
    records |= dict(zip(todo, encoded, strict=True))

    digests = {number: sha256_file(stems[number].with_suffix(".json")) for number in records}
    manifest = _build_manifest(corpus, tokenizer, [(split, source) for split, source, _ in shards], records, digests)
    expected_files = {stem.with_suffix(suffix) for stem in stems for suffix in (*SUFFIXES, ".json")}
    for split in corpus.splits:
        for path in (out / split).iterdir():
            if path not in expected_files:  # of a removed source, or partially written by a killed process
                path.unlink()
    write_manifest(out, KIND, asdict(manifest))
    return BuiltStore(**vars(manifest), reused=not todo)


def _has_other_tokens(
    out: Path, corpus: DocumentsManifest, tokenizer: Tokenizer, stems: set[Path], is_incomplete: bool
) -> bool:
    """Whether a finished store would be changed, and not only repaired or verified again."""
    path = out / MANIFEST
    before: dict[str, Any] = read_json(path) if path.exists() else {"unfinished": True}
    inputs = (before.get("documents_key"), before.get("tokenizer"))
    if before.get("unfinished") or inputs == (corpus.key, tokenizer.fingerprint):
        return False
    sources = [(split, source) for split, sources in before["splits"].items() for source in sources.values()]
    return is_incomplete or stems != {out / split / shard for split, source in sources for shard in source["shards"]}


def _build_manifest(
    corpus: DocumentsManifest,
    tokenizer: Tokenizer,
    owners: list[tuple[str, str]],
    records: dict[int, ShardRecord],
    digests: dict[int, str],
) -> StoreManifest:
    splits: dict[str, dict[str, SourceShards]] = {}
    for split, sources in corpus.splits.items():
        splits[split] = {}
        for source in sources:
            numbers = [number for number, owner in enumerate(owners) if owner == (split, source)]
            source_records = [records[number] for number in numbers]
            splits[split][source] = SourceShards(
                documents=sum(record.documents for record in source_records),
                tokens=sum(record.tokens for record in source_records),
                bytes=sum(record.bytes for record in source_records),
                shards=[record.shard for record in source_records],
                shard_tokens=[record.tokens for record in source_records],
                sha256=[record.files[".bin"] for record in source_records],
                records=[digests[number] for number in numbers],
            )
    return StoreManifest(
        format=FORMAT,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        documents_key=corpus.key,
        splits=splits,
        tokens=sum(record.tokens for record in records.values()),
        bytes=sum(record.bytes for record in records.values()),
    )


def _read_finished_record(stem: Path, key: str) -> ShardRecord | None:
    def is_intact(record: ShardRecord) -> bool:
        return set(record.files) == set(SUFFIXES) and all(
            sha256_file(stem.with_suffix(suffix)) == digest for suffix, digest in record.files.items()
        )

    return read_finished(ShardRecord, stem.with_suffix(".json"), key, is_intact)


def _encode_shard(
    parquet: Path,
    stem: Path,
    key: str,
    tokenizer_dir: Path,
    verify: float,
    advance: Callable[[float], None] = lambda size: None,
) -> ShardRecord:
    """One task: encode, verify, publish."""
    tokenizer = cached_tokenizer(tokenizer_dir, sha256_file(tokenizer_dir / "tokenizer.json"))
    unverified_stem = stem.with_name(f".{stem.name}-partial")
    documents = tokens = total_bytes = verified = 0
    with (
        TokenShardWriter(unverified_stem, tokenizer.vocab_size) as writer,
        pq.ParquetFile(arrow_source(parquet)) as table,
    ):
        for record_batch in table.iter_batches(
            batch_size=ENCODE_BATCH_DOCUMENTS, columns=["gid", "data_src", "title", "content"]
        ):
            gids, texts = record_batch["gid"].to_pylist(), record_batch["content"].to_pylist()
            encoded = tokenizer.encode_batch(texts)
            verified += _verify_encoding(gids, texts, encoded, tokenizer, verify, first=documents == 0)
            sizes = pc.binary_length(record_batch["content"])
            document_rows = pa.RecordBatch.from_arrays(
                [record_batch["gid"], record_batch["data_src"], record_batch["title"], sizes.cast(pa.int64())],
                schema=DOCS_SCHEMA,
            )
            documents += len(texts)
            tokens += writer.write(document_rows, encoded, tokenizer.eos_token_id)
            total_bytes += (size := pc.sum(sizes).as_py())
            advance(size)
    for suffix in SUFFIXES:
        unverified_stem.with_suffix(suffix).replace(stem.with_suffix(suffix))
    record = ShardRecord(stem.name, key, documents, tokens, total_bytes, verified, **vars(shard_checksums(stem)))
    write_record(stem.with_suffix(".json"), record)
    return record


def shard_checksums(stem: Path) -> ShardChecksums:
    return ShardChecksums(
        files={suffix: sha256_file(stem.with_suffix(suffix)) for suffix in SUFFIXES},
        sizes={suffix: stem.with_suffix(suffix).stat().st_size for suffix in SUFFIXES},
        blocks=block_checksums(stem.with_suffix(".bin")),
    )


@lru_cache(maxsize=1)
def cached_tokenizer(directory: Path, digest: str) -> Tokenizer:
    """Kept between the shards of a process: loading takes longer than a small shard, and backends warm up."""
    return Tokenizer(directory)


def _verify_encoding(
    gids: list[str], texts: list[str], encoded: list[Ids], tokenizer: Tokenizer, fraction: float, first: bool
) -> int:
    """Check a fraction of the documents, and the first of a shard, against the reference encoder and by decoding."""
    chosen = [
        number for number, gid in enumerate(gids) if int(gid[:6], 16) < fraction * 2**24 or (first and not number)
    ]
    reference = tokenizer.reference.encode([texts[number] for number in chosen])
    for number, ids in zip(chosen, reference, strict=True):
        if not np.array_equal(ids, encoded[number]):
            raise Z2aError(
                f"document {gids[number]}: the batch encoder and the reference encoder disagree; nothing was published"
            )
        if tokenizer.decode(ids) != tokenizer.normalize(texts[number]):
            raise Z2aError(f"document {gids[number]}: decoding does not give back its text; nothing was published")
    return len(chosen)
