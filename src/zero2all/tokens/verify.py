"""Checks that the files of a token store are those that its manifest describes.

A flipped bit, a truncated file or a shard of another store trains a worse model without an error, so a store is checked
before training reads it. Reading all of it would take hours at terabytes: the size of every shard is checked, and the
checksums of random blocks. 'z2a tokens build --verify' checks every byte.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np

from zero2all.base.io import read_record, sha256_file
from zero2all.tokens.manifest import ShardRecord
from zero2all.tokens.token_store import MASK_SUFFIX, TokenShard, TokenStore, damaged_error

BLOCK_BYTES = 1 << 20
BLOCKS_PER_RANK = 32  # at each start: 32 MiB
MAX_BLOCKS_TOTAL = 1024  # over all ranks, which share one file system


def block_checksums(path: Path) -> list[int]:
    """CRC-32 of each block of a file."""
    with open(path, "rb") as stream:
        return [zlib.crc32(block) for block in iter(lambda: stream.read(BLOCK_BYTES), b"")]


def verify_store(store: TokenStore, rank: int = 0, world_size: int = 1, seed: int | None = None) -> None:
    """Raise an error that names the first damaged shard. Each rank checks the sizes of its share of the shards.

    Every start and every rank draws different blocks, unless ``seed`` is given.
    """
    shards = [shard for source_shards in store.sources.values() for shard in source_shards]
    for shard in shards[rank::world_size]:
        shard.check_sizes()
    # From the manifest, not from the files: a thousand ranks must not stat every file.
    firsts = np.cumsum([0, *(-(-shard.bin_bytes // BLOCK_BYTES) for shard in shards)])
    total = int(firsts[-1])
    count = min(total, BLOCKS_PER_RANK, max(1, MAX_BLOCKS_TOTAL // world_size))
    chosen = sorted(random.Random(seed).sample(range(total), count))
    records: dict[int, ShardRecord] = {}
    for block in chosen:
        number = int(np.searchsorted(firsts, block, side="right")) - 1
        if number not in records:
            records[number] = _read_shard_record(shards[number])
        _verify_block(shards[number], records[number], block - int(firsts[number]))


def _read_shard_record(shard: TokenShard) -> ShardRecord:
    """The record that the build wrote for a shard; its checksum in the manifest detects a shard of another store."""
    path = shard.stem.with_suffix(".json")
    if not path.exists():
        raise damaged_error(path, "is missing")
    if shard.manifest_entry is None or sha256_file(path) != shard.manifest_entry.record_sha256:
        raise damaged_error(path, "does not match the store's manifest")
    record = read_record(ShardRecord, path)
    for suffix, size in record.sizes.items():
        file = shard.stem.with_suffix(suffix)
        if not file.exists():
            raise damaged_error(file, "is missing")
        if file.stat().st_size != size:
            raise damaged_error(file, f"has {file.stat().st_size} bytes, not {size}")
    return record


def _verify_block(shard: TokenShard, record: ShardRecord, number: int) -> None:
    _verify_checksum(shard.stem.with_suffix(".bin"), number, record.blocks[number])
    if record.mask_blocks:  # the one at the same place, about
        place = number * len(record.mask_blocks) // len(record.blocks)
        _verify_checksum(shard.stem.with_suffix(MASK_SUFFIX), place, record.mask_blocks[place])


def _verify_checksum(path: Path, number: int, recorded: int) -> None:
    with open(path, "rb") as stream:
        stream.seek(number * BLOCK_BYTES)
        if zlib.crc32(stream.read(BLOCK_BYTES)) != recorded:
            raise damaged_error(
                path,
                f"does not match its checksum between bytes {number * BLOCK_BYTES} and {(number + 1) * BLOCK_BYTES}",
            )
