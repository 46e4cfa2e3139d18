"""``z2a tokens build``: document shards to token shards, one to one, each published only after verification."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.base.console import progress, warn
from zero2all.base.conversation import SourceKind
from zero2all.base.directory_lock import lock_output
from zero2all.base.errors import Z2aError
from zero2all.base.io import (
    MANIFEST,
    fingerprint,
    read_json,
    require_replaceable,
    sha256_file,
    write_json,
    write_record,
)
from zero2all.base.manifest import is_intact, read_documents_manifest, read_finished, sampled_digest, write_manifest
from zero2all.base.paths import arrow_source
from zero2all.base.records import DocumentsManifest
from zero2all.base.tasks import TaskEngine
from zero2all.base.units import show_bytes
from zero2all.recipe import TokensRecipe
from zero2all.tokenizer import Ids, Tokenizer
from zero2all.tokenizer.hf_directory import TOKENIZER_FILES
from zero2all.tokens.chat_documents import (
    CHAT_COLUMNS,
    COLUMNS,
    RenderedDocuments,
    check_chat_template,
    render_chats,
    render_text,
)
from zero2all.tokens.manifest import BuiltStore, ShardChecksums, ShardRecord, SourceShards, StoreManifest
from zero2all.tokens.token_store import DOCS_SCHEMA, FORMAT, KIND, MASK_SUFFIX, TokenShardWriter
from zero2all.tokens.verify import block_checksums

SUFFIXES = (".bin", ".idx", ".docs.arrow")
MASK_VERSION = 1
ENCODE_BATCH_DOCUMENTS = 256


def build_tokens(
    recipe: TokensRecipe,
    documents: Path,
    tokenizer_dir: Path,
    out: Path,
    engine: TaskEngine | None = None,
    before_replace: Callable[[], None] = lambda: None,
    *,
    verify: bool = False,
) -> BuiltStore:
    """Encode both splits of ``documents`` into ``out``. A shard whose input and tokenizer are unchanged is kept.

    ``before_replace`` is called before the tokens in ``out`` are replaced by others, and may raise. With ``verify``
    every byte of finished shards is compared with its checksum, not only samples.
    """
    with lock_output(out, "tokens build"):
        return _build_tokens(
            recipe, documents, tokenizer_dir, out, engine or TaskEngine(), before_replace, verify=verify
        )


def _build_tokens(
    recipe: TokensRecipe,
    documents: Path,
    tokenizer_dir: Path,
    out: Path,
    engine: TaskEngine,
    before_replace: Callable[[], None],
    *,
    verify: bool,
) -> BuiltStore:
    corpus = read_documents_manifest(documents)
    tokenizer = Tokenizer(tokenizer_dir)
    shards = [
        _Shard(
            split=split,
            source=source,
            kind=entry.kind,
            documents=documents / split / name,
            stem=out / split / Path(name).stem,
            key=_shard_key(corpus.files[f"{split}/{name}"], entry.kind, tokenizer, recipe),
        )
        for split, sources in corpus.splits.items()
        for source, entry in sources.items()
        for name in entry.shards
    ]
    for source in sorted({shard.source for shard in shards if shard.kind != "text"}):
        check_chat_template(tokenizer, source)
    require_replaceable(out, KIND)
    found = {shard: record for shard in shards if (record := _read_finished_record(shard, verify=verify)) is not None}
    todo = [shard for shard in shards if shard not in found]
    template = tokenizer.chat_fingerprint if any(shard.kind != "text" for shard in shards) else ""
    inputs = (corpus.key, tokenizer.fingerprint, template)
    if _has_other_tokens(out, inputs, {shard.stem for shard in shards}, is_incomplete=bool(todo)):
        before_replace()
    if todo:
        # From here on the old manifest no longer describes the store.
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / MANIFEST, {"kind": KIND, "unfinished": True})
    for split in corpus.splits:
        (out / split).mkdir(parents=True, exist_ok=True)
    left = corpus.bytes - sum(record.bytes for record in found.values())
    with progress(f"encoding {show_bytes(corpus.bytes)}", corpus.bytes) as advance:
        advance(corpus.bytes - left)
        tasks = [(shard, tokenizer_dir, recipe.verify) for shard in todo]
        if engine.in_process:
            encoded = engine.run(partial(_encode_shard, advance=advance), tasks)
        else:
            encoded = engine.run(_encode_shard, tasks, lambda task: advance(left / len(tasks)))
    found |= dict(zip(todo, encoded, strict=True))

    records = {shard: found[shard] for shard in shards}
    manifest = _build_manifest(corpus, tokenizer, template, records)
    _warn_about_refused(records)
    _remove_other_files([out / split for split in corpus.splits], shards)
    write_manifest(out, KIND, asdict(manifest))
    return BuiltStore(**vars(manifest), reused=not todo)


@dataclass(frozen=True)
class _Shard:
    """A shard of documents, and the shard of tokens that it becomes."""

    split: str
    source: str
    kind: SourceKind
    documents: Path
    stem: Path
    key: str
    """Fingerprint of everything that the tokens depend on."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return SUFFIXES if self.kind == "text" else (*SUFFIXES, MASK_SUFFIX)

    @property
    def record(self) -> Path:
        return self.stem.with_suffix(".json")


Records = dict[_Shard, ShardRecord]


def _shard_key(digest: str, kind: SourceKind, tokenizer: Tokenizer, recipe: TokensRecipe) -> str:
    template = [] if kind == "text" else [tokenizer.chat_fingerprint, MASK_VERSION]
    kinds = [kind] if kind in ("preference", "rating") else []
    return fingerprint([FORMAT, digest, tokenizer.fingerprint, recipe.verify, *template, *kinds])


def _remove_other_files(directories: list[Path], shards: list[_Shard]) -> None:
    """Files of a removed source, or partially written by a killed process."""
    expected = {shard.stem.with_suffix(suffix) for shard in shards for suffix in (*shard.suffixes, ".json")}
    for directory in directories:
        for path in directory.iterdir():
            if path not in expected:
                path.unlink()


def _warn_about_refused(records: Records) -> None:
    for source in dict.fromkeys(shard.source for shard in records):
        refused = [record for shard, record in records.items() if shard.source == source and record.refused]
        if refused:
            count = sum(record.refused for record in refused)
            warn(f"source {source!r}: {count} conversations are left out; the first is {refused[0].first_refused}")


def _has_other_tokens(out: Path, inputs: tuple[str, str, str], stems: set[Path], *, is_incomplete: bool) -> bool:
    """Whether a finished store would be changed, and not only repaired or verified again.

    ``inputs`` are the fingerprints of documents, tokenizer and chat template.
    """
    path = out / MANIFEST
    before: dict[str, Any] = read_json(path) if path.exists() else {"unfinished": True}
    inputs_before = (before.get("documents_key"), before.get("tokenizer"), before.get("chat_template", ""))
    if before.get("unfinished") or inputs == inputs_before:
        return False
    sources = [(split, source) for split, sources in before["splits"].items() for source in sources.values()]
    return is_incomplete or stems != {out / split / shard for split, source in sources for shard in source["shards"]}


def _build_manifest(corpus: DocumentsManifest, tokenizer: Tokenizer, template: str, records: Records) -> StoreManifest:
    splits: dict[str, dict[str, SourceShards]] = {}
    for split, sources in corpus.splits.items():
        splits[split] = {}
        for source, entry in sources.items():
            mine = {
                shard: record for shard, record in records.items() if (shard.split, shard.source) == (split, source)
            }
            splits[split][source] = SourceShards(
                documents=sum(record.documents for record in mine.values()),
                tokens=sum(record.tokens for record in mine.values()),
                bytes=sum(record.bytes for record in mine.values()),
                shards=[record.shard for record in mine.values()],
                shard_tokens=[record.tokens for record in mine.values()],
                sha256=[record.files[".bin"] for record in mine.values()],
                records=[sha256_file(shard.record) for shard in mine],
                refused=sum(record.refused for record in mine.values()),
                kind=entry.kind,
            )
    return StoreManifest(
        format=FORMAT,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        documents_key=corpus.key,
        splits=splits,
        tokens=sum(record.tokens for record in records.values()),
        bytes=sum(record.bytes for record in records.values()),
        chat_template=template,
    )


def _read_finished_record(shard: _Shard, *, verify: bool) -> ShardRecord | None:
    def are_intact(record: ShardRecord) -> bool:
        return set(record.files) == set(shard.suffixes) and all(
            is_intact(shard.stem.with_suffix(suffix), shard.record, digest, record.samples.get(suffix), verify=verify)
            for suffix, digest in record.files.items()
        )

    return read_finished(ShardRecord, shard.record, shard.key, are_intact)


def _encode_shard(
    shard: _Shard, tokenizer_dir: Path, verify: float, advance: Callable[[float], None] = lambda size: None
) -> ShardRecord:
    """One task: encode, verify, publish."""
    tokenizer, stem, kind = load_tokenizer(tokenizer_dir), shard.stem, shard.kind
    unverified_stem = stem.with_name(f".{stem.name}-partial")
    documents = tokens = total_bytes = verified = 0
    refused: list[str] = []
    with (
        TokenShardWriter(unverified_stem, tokenizer.vocab_size, with_mask=kind != "text") as writer,
        pq.ParquetFile(arrow_source(shard.documents)) as table,
    ):
        batches = table.iter_batches(ENCODE_BATCH_DOCUMENTS, columns=COLUMNS if kind == "text" else CHAT_COLUMNS)
        for rendered in _render_ahead(batches, tokenizer, kind):
            refused += rendered.refused
            gids = rendered.batch["gid"].to_pylist()
            parts = [chat.parts for chat in rendered.chats]
            masks = None
            if kind == "text":
                encoded = tokenizer.encode_split(tokenizer.backend, parts)
            else:
                chats = tokenizer.encode_chats(tokenizer.backend, rendered.chats)
                encoded = [chat.ids for chat in chats]
                masks = [chat.generated * np.uint8(mark) for chat, mark in zip(chats, rendered.labels, strict=True)]
            verified += _verify_encoding(gids, parts, encoded, tokenizer, verify, first=documents == 0)
            document_rows = pa.RecordBatch.from_arrays(
                [rendered.batch["gid"], rendered.batch["data_src"], rendered.batch["title"], rendered.sizes],
                schema=DOCS_SCHEMA,
            )
            documents += len(gids)
            tokens += writer.write(document_rows, encoded, tokenizer.eos_token_id, masks)
            total_bytes += (size := pc.sum(rendered.sizes).as_py() or 0)
            advance(size)
    for suffix in shard.suffixes:
        unverified_stem.with_suffix(suffix).replace(stem.with_suffix(suffix))
    counts, checksums = (documents, tokens, total_bytes, verified), vars(shard_checksums(stem))
    first_refused = "".join(refused[:1])
    record = ShardRecord(stem.name, shard.key, *counts, **checksums, refused=len(refused), first_refused=first_refused)
    write_record(shard.record, record)
    return record


def _render_ahead(
    batches: Iterator[pa.RecordBatch], tokenizer: Tokenizer, kind: SourceKind
) -> Iterator[RenderedDocuments]:
    """Conversations are rendered in a child process: the next batch while this one is encoded."""
    if kind == "text":
        yield from map(render_text, batches)
        return
    with ThreadPoolExecutor(1) as pool:
        pending: deque[Future[RenderedDocuments]] = deque()
        for batch in batches:
            pending.append(pool.submit(render_chats, batch, tokenizer, kind))
            if len(pending) > 1:
                yield pending.popleft().result()
        for last in pending:
            yield last.result()


def shard_checksums(stem: Path) -> ShardChecksums:
    paths = {suffix: stem.with_suffix(suffix) for suffix in (*SUFFIXES, MASK_SUFFIX)}
    paths = {suffix: path for suffix, path in paths.items() if path.exists()}
    return ShardChecksums(
        files={suffix: sha256_file(path) for suffix, path in paths.items()},
        sizes={suffix: path.stat().st_size for suffix, path in paths.items()},
        blocks=block_checksums(stem.with_suffix(".bin")),
        mask_blocks=block_checksums(paths[MASK_SUFFIX]) if MASK_SUFFIX in paths else [],
        samples={suffix: sampled_digest(path) for suffix, path in paths.items()},
    )


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer as its files are now."""
    paths = [directory / name for name in TOKENIZER_FILES]
    return cached_tokenizer(directory, tuple(sha256_file(path) for path in paths if path.exists()))


@lru_cache(maxsize=1)
def cached_tokenizer(directory: Path, digests: tuple[str, ...]) -> Tokenizer:
    """Kept between the shards of a process: loading takes longer than a small shard, and backends warm up."""
    return Tokenizer(directory)


def _verify_encoding(
    gids: list[str], parts: list[list[str]], encoded: list[Ids], tokenizer: Tokenizer, fraction: float, *, first: bool
) -> int:
    """Check a fraction of the documents, and the first of a shard, against the reference encoder and by decoding."""
    chosen = [
        number for number, gid in enumerate(gids) if int(gid[:6], 16) < fraction * 2**24 or (first and not number)
    ]
    reference = tokenizer.encode_split(tokenizer.reference, [parts[number] for number in chosen])
    for number, ids in zip(chosen, reference, strict=True):
        if not np.array_equal(ids, encoded[number]):
            raise Z2aError(
                f"document {gids[number]}: the batch encoder and the reference encoder disagree; nothing was published"
            )
        if not _decodes_to(ids, parts[number], tokenizer):
            raise Z2aError(f"document {gids[number]}: decoding does not give back its text; nothing was published")
    return len(chosen)


def _decodes_to(ids: Ids, parts: list[str], tokenizer: Tokenizer) -> bool:
    """Whether ids decode to their text. Spaces that a vocabulary puts after every special token are not text."""
    first, *rest = parts
    if rest and tokenizer.vocabulary.space_before == "always":
        return True
    follows = tokenizer.vocabulary.without_space_before()
    after = [part if number % 2 == 0 else follows.normalize(part) for number, part in enumerate(rest)]
    return tokenizer.decode(ids) == "".join([tokenizer.normalize(first), *after])
