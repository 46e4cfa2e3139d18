"""Test sets: any files, tokenized without building a corpus, each a token shard with a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from zero2all.base.console import warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import MANIFEST, atomic_dir, fingerprint
from zero2all.base.manifest import checksums, is_current, read_manifest, write_manifest
from zero2all.base.records import parse_record
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import source_file_names
from zero2all.tokenizer import Tokenizer
from zero2all.tokens.token_store import DOCS_SCHEMA, ShardManifestEntry, TokenShard, TokenShardWriter

if TYPE_CHECKING:
    from zero2all.corpus.readers import RawFile

KIND = "test set"
STEM = "tokens"
FORMAT = 1


@dataclass(frozen=True)
class TokenizedSet:
    """``manifest.json`` of a tokenized test set."""

    key: str
    tokenizer: str
    """Fingerprint."""
    vocab_size: int
    documents: int
    tokens: int
    text_sha256: str
    """sha256 of the text of all documents."""
    files: dict[str, str]
    """sha256 by name."""


def build_test_sets(paths: Mapping[str, str], tokenizer: Tokenizer, out: Path) -> None:
    """Tokenize every test set into a directory below ``out``. One whose files have not changed is kept."""
    for name, directory in _directories(paths, out).items():
        build_test_set(name, paths[name], tokenizer, directory)


def open_test_sets(names: Iterable[str], out: Path) -> dict[str, TokenShard]:
    """The test sets that ``build_test_sets`` has written to ``out``."""
    return {name: open_test_set(directory) for name, directory in _directories(names, out).items()}


def find_test_sets(names: Iterable[str], tokenizer: Tokenizer, out: Path) -> dict[str, TokenShard]:
    """The test sets among ``names`` that exist, are intact and fit this tokenizer."""
    directories = _directories(names, out)
    return {name: open_test_set(path) for name, path in directories.items() if _is_usable(path, tokenizer)}


def _directories(names: Iterable[str], out: Path) -> dict[str, Path]:
    return {name: out / file_name for name, file_name in source_file_names(names).items()}


def build_test_set(name: str, path: str, tokenizer: Tokenizer, out: Path) -> None:
    """Tokenize the files at ``path``, which may be a directory, a glob or a URL."""
    from zero2all.corpus.readers import list_files

    source = SourceRecipe(name=name, paths=[path], follow_links=True)
    before = _read_manifest(out)
    try:
        files = list_files(source)
    except UsageError as error:
        problem = str(error).removeprefix(f"corpus source {name!r}: ")
        if not _is_usable(out, tokenizer):
            raise UsageError(f"test set {name!r}: {problem}") from error
        warn(f"test set {name!r}: {problem}; its tokens from an earlier start are used")
        return
    key = fingerprint([FORMAT, tokenizer.fingerprint, [(file.name, file.fingerprint) for file in files]])
    if is_current(out, KIND, key):
        return
    written = write_test_set(name, key, read_test_documents(name, files, source), tokenizer, out)
    if before is not None and before.text_sha256 != written.text_sha256:
        warn(f"test set {name!r} has changed: its metrics cannot be compared with those before")


def read_test_documents(name: str, files: list[RawFile], source: SourceRecipe) -> Iterator[pa.RecordBatch]:
    """The documents of a test set. A file that cannot be read is an error: the metric would measure other text."""
    from zero2all.corpus.ingest import FileStats, read_documents

    stats = FileStats()
    for file in files:
        yield from read_documents(file, source, stats)
        for reason in stats.unreadable:
            raise UsageError(f"test set {name!r}: {file.name} cannot be read: {reason}")
    for reason, records in stats.skipped.items():
        warn(f"test set {name!r}: {records} records are not scored: {reason}")


def write_test_set(
    name: str, key: str, batches: Iterable[pa.RecordBatch], tokenizer: Tokenizer, out: Path
) -> TokenizedSet:
    """Encode documents into a directory, which is replaced at once when it is complete."""
    digest, documents, tokens = hashlib.sha256(), 0, 0
    with atomic_dir(out, KIND) as partial:
        with TokenShardWriter(partial / STEM, tokenizer.vocab_size) as writer:
            for batch in batches:
                texts = batch["content"].to_pylist()
                for text in texts:
                    digest.update(text.encode() + b"\0")
                sizes = pc.binary_length(batch["content"]).cast(pa.int64())
                rows = pa.RecordBatch.from_arrays(
                    [batch["gid"], batch["data_src"], batch["title"], sizes], schema=DOCS_SCHEMA
                )
                tokens += writer.write(rows, tokenizer.encode_batch(texts), tokenizer.eos_token_id)
                documents += len(texts)
        if not documents:
            raise UsageError(f"test set {name!r} has no text")
        manifest = TokenizedSet(
            key=key,
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            documents=documents,
            tokens=tokens,
            text_sha256=digest.hexdigest(),
            files=checksums(partial),
        )
        write_manifest(partial, KIND, asdict(manifest))
    return manifest


def open_test_set(directory: Path) -> TokenShard:
    manifest = _read_manifest(directory)
    if manifest is None:
        raise Z2aError(f"no tokens of a test set in {directory}: 'z2a train RECIPE' makes them when it starts")
    return TokenShard(directory / STEM, ShardManifestEntry(manifest.tokens, manifest.vocab_size, ""))


def _is_usable(directory: Path, tokenizer: Tokenizer) -> bool:
    manifest = _read_manifest(directory)
    if manifest is None or manifest.tokenizer != tokenizer.fingerprint:
        return False
    return is_current(directory, KIND, manifest.key)


def _read_manifest(directory: Path) -> TokenizedSet | None:
    """None without a readable one."""
    try:
        content = read_manifest(directory, KIND, "z2a train RECIPE")
        return parse_record(TokenizedSet, content, directory / MANIFEST)
    except Z2aError:
        return None
