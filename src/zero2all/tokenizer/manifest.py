"""Records in the manifest of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero2all.base.io import sha256_file
from zero2all.tokenizer.word_count import WordCounts

KIND = "tokenizer"


@dataclass(frozen=True)
class LearnedVocabulary:
    """What a trainer gives."""

    definition: bytes
    """``tokenizer.json``."""
    special_tokens: list[str]
    num_learned: int
    """Tokens besides the special ones."""
    trained_on_bytes: int
    counted: WordCounts | None
    model: bytes | None
    """``tokenizer.model``, if sentencepiece has trained it."""


@dataclass(frozen=True)
class TokenizerManifest:
    """``manifest.json`` of a trained tokenizer, without the kind and version that every manifest begins with."""

    key: str
    vocab_size: int
    learned: int
    """Tokens besides the special ones."""
    special_tokens: list[str]
    pattern: str
    """Name of the pattern, a regular expression, or ``sentencepiece-`` and the algorithm."""
    trained_on_bytes: int
    counted: WordCounts | None
    """The counts of the trainer ``zero2all``."""
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


@dataclass(frozen=True)
class ImportedTokenizer:
    """``manifest.json`` of a tokenizer of somebody else."""

    key: str
    imported_from: str
    """Name of the file or directory."""
    vocab_size: int
    special_tokens: list[str]
    compared_with_sentencepiece: int
    """Number of texts on which the ids equal the sentencepiece package's."""
    files: dict[str, str]


def is_other_tokenizer(before: Path, now: Path) -> bool:
    """Whether the first directory has a tokenizer, and the second one another."""
    old, new = before / "tokenizer.json", now / "tokenizer.json"
    return old.exists() and sha256_file(old) != sha256_file(new)
