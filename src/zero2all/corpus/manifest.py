"""Records in the manifest of a corpus: what is in its splits, and what was skipped, changed and dropped on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zero2all.conversation import SourceKind
from zero2all.corpus.document import Document

SPLITS = ("train", "valid")
MAX_NAMES_PER_REASON = 20  # of skipped files


@dataclass(frozen=True, slots=True)
class Example:
    """The beginning of a document, for a person to look at."""

    gid: str
    title: str
    text: str

    @classmethod
    def from_document(cls, document: Document, characters: int) -> Example:
        return cls(document.gid, document.title, document.content[:characters])


@dataclass(slots=True)
class DroppedDocuments:
    """Counts of documents dropped for one reason, with some examples."""

    documents: int = 0
    bytes: int = 0
    samples: list[Example] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """Documents and bytes of text that were read, before filters."""

    documents: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SplitShards:
    """One source in one split."""

    documents: int
    bytes: int
    shards: list[str]
    """File names, in the directory of the split."""
    kind: SourceKind = "text"


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Counts of a source over all its files."""

    files: int
    read: ReadCounts
    left_out: dict[str, int]
    """Records that gave no document, by reason."""
    changed: dict[str, int]
    """Documents by the filter that changed them."""
    dropped: dict[str, DroppedDocuments]
    """By reason."""
    quarantine: list[str]
    """Where broken records are, each with its reason."""


@dataclass(slots=True)
class SkippedFiles:
    """Files that were skipped for one reason, or that have records which were."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Names of the first few."""

    def add(self, names: list[str], count: int = 1) -> None:
        """Count more files, of which these are the first."""
        self.count += count
        self.first = (self.first + names)[:MAX_NAMES_PER_REASON]


@dataclass(frozen=True, slots=True)
class SkippedBySource:
    """What of a source gave no document."""

    documents: dict[str, int]
    """Records by reason."""
    files: dict[str, SkippedFiles]
    """By reason."""
    record_files: dict[str, SkippedFiles] = field(default_factory=dict)
    """Files with such records, by reason. Empty in manifests of 0.2."""


@dataclass(frozen=True)
class CorpusManifest:
    """``manifest.json`` of a corpus, without the kind and version that every manifest begins with."""

    key: str
    format: int
    documents: int
    bytes: int
    splits: dict[str, dict[str, SplitShards]]
    """By split and source."""
    sources: dict[str, SourceCounts]
    left_out: dict[str, SkippedBySource]
    filters: list[str | dict[str, Any]]
    files: dict[str, str]
    """sha256 of every shard."""
    samples: dict[str, str] = field(default_factory=dict)
    """Hash of some blocks of every shard: what a rerun compares. Empty in an object store."""


@dataclass(frozen=True, kw_only=True)
class BuiltCorpus(CorpusManifest):
    """The result of a build."""

    reused: bool
    """Whether the corpus was there already, of the same inputs and options."""
