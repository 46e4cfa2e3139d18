"""Numbers of tokens in place of a token store that is not built yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from zero2all.conversation import SourceKind
from zero2all.io import MANIFEST, read_documents_manifest
from zero2all.tokens.token_store import TokenShard

LARGE_VOCABULARY = 32768
BYTES_PER_TOKEN = (3, 4)  # of mixed Chinese, English and code: below a large vocabulary, and with one


class SizedStore(Protocol):
    """What planning needs of a token store; ``TokenStore`` has it."""

    @property
    def sources(self) -> Mapping[str, list[TokenShard]]: ...

    @property
    def shard_tokens(self) -> Mapping[str, list[int]]: ...

    @property
    def kinds(self) -> Mapping[str, SourceKind]: ...

    @property
    def fingerprint(self) -> str: ...


class EstimatedStore:
    """Enough to plan a run: steps, epochs, schedule. It has nothing to read."""

    fingerprint = ""

    def __init__(self, source_tokens: Mapping[str, int]) -> None:
        self.sources: dict[str, list[TokenShard]] = {name: [] for name in source_tokens}
        self.shard_tokens = {name: [tokens] for name, tokens in source_tokens.items()}
        # Whether conversations are cut makes little difference to their tokens.
        self.kinds: dict[str, SourceKind] = dict.fromkeys(source_tokens, "text")


def estimate_source_tokens(documents: Path, vocab_size: int) -> dict[str, int] | None:
    """Tokens of each source, from the size of its documents; None if they are not built."""
    if not (documents / MANIFEST).exists():
        return None
    training = read_documents_manifest(documents).splits["train"]
    size = BYTES_PER_TOKEN[vocab_size >= LARGE_VOCABULARY]
    return {name: source.bytes // size for name, source in training.items()}
