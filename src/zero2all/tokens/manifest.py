"""Records of a token store: its manifest, and beside every shard a record of the shard."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero2all.base.conversation import SourceKind


@dataclass(frozen=True)
class ShardChecksums:
    """What detects a change of a shard's files."""

    files: dict[str, str]
    """sha256 by suffix."""
    sizes: dict[str, int]
    """Bytes by suffix."""
    blocks: list[int]
    """CRC-32 of the blocks of the ``.bin`` file."""
    mask_blocks: list[int]
    """The same of the ``.mask`` file, if there is one."""
    samples: dict[str, str]
    """Hash of some blocks of each file, by suffix: what a rerun compares."""


@dataclass(frozen=True)
class ShardRecord:
    """The record of a finished shard, written last and valid only while the shard's files match it."""

    shard: str
    key: str
    documents: int
    tokens: int
    bytes: int
    verified: int
    """Documents whose encoding was checked."""
    files: dict[str, str]
    sizes: dict[str, int]
    blocks: list[int]
    refused: int = 0
    """Conversations that the chat template does not take."""
    first_refused: str = ""
    """The gid of the first, and why."""
    mask_blocks: list[int] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceShards:
    """One source in one split; lists have an element for each shard."""

    documents: int
    tokens: int
    bytes: int
    shards: list[str]
    shard_tokens: list[int]
    sha256: list[str]
    """sha256 of every ``.bin``."""
    records: list[str]
    """sha256 of the shard's own record."""
    refused: int = 0
    """Conversations that the chat template does not take."""
    kind: SourceKind = "text"


@dataclass(frozen=True)
class StoreManifest:
    """``manifest.json`` of a token store, without the kind and version that every manifest begins with."""

    format: int
    tokenizer: str
    """Fingerprint."""
    vocab_size: int
    documents_key: str
    splits: dict[str, dict[str, SourceShards]]
    """Shards by split and source."""
    tokens: int
    bytes: int
    chat_template: str = ""
    """Fingerprint; empty without conversations."""


@dataclass(frozen=True, kw_only=True)
class BuiltStore(StoreManifest):
    """The result of a build."""

    reused: bool
    """Whether all shards were there already, of the same documents and tokenizer."""
