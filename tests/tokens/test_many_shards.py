"""Stores with more shards than a process may have open."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from zero2all.tokens import PackedDataset, TokenStore
from zero2all.tokens.token_store import (
    DOCS_SCHEMA,
    MAX_OPEN_INDEXES,
    MAX_OPEN_SHARDS,
    TokenShardWriter,
    _load_document_index,
    _map_document_offsets,
    _map_tokens,
)

SHARDS = 300


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    (root / "train").mkdir()
    for number in range(SHARDS):
        document_rows = pa.RecordBatch.from_arrays([[f"{number:032x}"], ["s"], ["t"], [64]], schema=DOCS_SCHEMA)
        with TokenShardWriter(root / "train" / f"s-{number:05}", 320) as writer:
            writer.write(document_rows, [np.full(64, number % 256)], end_of_text=256)
    counts = {"documents": SHARDS, "tokens": 65 * SHARDS, "bytes": 64 * SHARDS}
    entry = counts | {
        "shards": [f"s-{number:05}" for number in range(SHARDS)],
        "shard_tokens": [65] * SHARDS,
        "sha256": ["0"] * SHARDS,
        "records": ["0"] * SHARDS,
    }
    manifest = {"kind": "tokens", "format": 2, "tokenizer": "x", "vocab_size": 320, "documents_key": "x"}
    manifest |= {"splits": {"train": {"s": entry}}, "tokens": 65 * SHARDS, "bytes": 64 * SHARDS}
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Enough for the shards that may be open, with their masks and offsets, and too few for all of them."""
    for cache in (_map_tokens, _map_document_offsets, _load_document_index):
        cache.cache_clear()  # shards of earlier tests
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 3 * MAX_OPEN_SHARDS + 32, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_shards_beyond_the_descriptor_limit_are_read_and_released(store: Path) -> None:
    dataset = PackedDataset(TokenStore(store, "train"), 32, document_mask=True)
    seen = set()
    for first in range(0, dataset.samples_per_epoch, 8):
        seen |= {int(row[0]) for row in dataset.tokens(first, min(first + 8, dataset.samples_per_epoch))}
    assert len(seen) == 256
    assert mapped_files(store, ".bin") <= MAX_OPEN_SHARDS
    assert mapped_files(store, ".idx") <= MAX_OPEN_SHARDS


@pytest.mark.usefixtures("few_descriptors")
def test_documents_of_shards_beyond_the_descriptor_limit_are_named(store: Path) -> None:
    dataset = PackedDataset(TokenStore(store, "train"), 32)
    gids = {span.gid for span in dataset.documents(0, dataset.samples_per_epoch)}
    assert len(gids) == SHARDS
    assert mapped_files(store, ".docs.arrow") <= MAX_OPEN_INDEXES


def mapped_files(store: Path, suffix: str) -> int:
    """How many files of the store this process has mapped; only Linux says it."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in lines if str(store) in line and line.endswith(suffix)})
