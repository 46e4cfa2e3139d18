"""Whether the files of a token store are those that its manifest describes.

A flipped bit, a truncated file or a shard of another store trains a worse model without an error, so a store is checked
before training reads it. Reading all of it would take hours at terabytes: sizes are checked of every shard, contents
of random blocks, each against a checksum from the build. 'z2a tokens build' checks every byte.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.io import read_json, sha256_file
from zero2all.tokens.store import TokenShard, TokenStore, damaged

BLOCK = 1 << 20
BLOCKS_CHECKED = 32  # of a rank at each start: 32 MiB
BLOCKS_IN_ALL = 1024  # of all ranks, where there are many: they share one file system


def block_checksums(path: Path) -> list[int]:
    """CRC-32 of each block of a file."""
    with open(path, "rb") as stream:
        return [zlib.crc32(block) for block in iter(lambda: stream.read(BLOCK), b"")]


def check_store(store: TokenStore, rank: int = 0, ranks: int = 1, seed: int | None = None) -> None:
    """Raise an error that names the first damaged shard. Rank r of R checks its share of the shards' sizes.

    Every start and every rank draws other blocks, unless ``seed`` is given.
    """
    shards = [shard for of_source in store.sources.values() for shard in of_source]
    for shard in shards[rank::ranks]:
        shard.check_sizes()
    # From the manifest, not from the files: a thousand ranks need not ask the file system for each of them.
    firsts = np.cumsum([0, *(-(-shard.bin_bytes // BLOCK) for shard in shards)])
    total = int(firsts[-1])
    count = min(total, BLOCKS_CHECKED, max(1, BLOCKS_IN_ALL // ranks))
    chosen = sorted(random.Random(seed).sample(range(total), count))
    records: dict[int, dict[str, Any]] = {}
    for block in chosen:
        number = int(np.searchsorted(firsts, block, side="right")) - 1
        if number not in records:
            records[number] = _record(shards[number])
        _check_block(shards[number], records[number], block - int(firsts[number]))


def _record(shard: TokenShard) -> dict[str, Any]:
    """What the build wrote down of a shard; the manifest has its checksum, so a shard of another store is noticed."""
    path = shard.stem.with_suffix(".json")
    if not path.exists():
        raise damaged(path, "is missing")
    if shard.expected is None or sha256_file(path) != shard.expected.record:
        raise damaged(path, "does not match the store's manifest")
    record: dict[str, Any] = read_json(path)
    for suffix, size in record["sizes"].items():
        file = shard.stem.with_suffix(suffix)
        if not file.exists():
            raise damaged(file, "is missing")
        if file.stat().st_size != size:
            raise damaged(file, f"has {file.stat().st_size} bytes, not {size}")
    return record


def _check_block(shard: TokenShard, record: dict[str, Any], number: int) -> None:
    path = shard.stem.with_suffix(".bin")
    with open(path, "rb") as stream:
        stream.seek(number * BLOCK)
        if zlib.crc32(stream.read(BLOCK)) != record["blocks"][number]:
            raise damaged(
                path, f"does not match its checksum between bytes {number * BLOCK} and {(number + 1) * BLOCK}"
            )
