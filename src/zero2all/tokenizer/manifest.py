"""Records in the manifest of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.tokenizer.word_count import WordCounts

KIND = "tokenizer"


@dataclass(frozen=True)
class TokenizerManifest:
    """``manifest.json`` of a trained tokenizer, without the kind and version that every manifest begins with."""

    key: str
    vocab_size: int
    learned: int
    """Tokens besides the special ones."""
    special_tokens: list[str]
    pattern: str
    trained_on_bytes: int
    counted: WordCounts
    files: dict[str, str]
    """sha256 by name."""


@dataclass(frozen=True)
class TrainedTokenizer(TokenizerManifest):
    """The result of training."""

    reused: bool
    """Whether the tokenizer was there already, of the same documents and options."""


@dataclass(frozen=True)
class ExtendedTokenizer:
    """``manifest.json`` of an extended tokenizer."""

    key: str
    extends: str
    """Fingerprint of the old tokenizer."""
    vocab_size: int
    learned: int
    """New tokens."""
    trained_on_bytes: int
    files: dict[str, str]
