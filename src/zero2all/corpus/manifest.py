"""Records in the manifest of a corpus: what is in its splits, and what was skipped, changed and dropped on the way.

``summary_lines`` is what a build prints of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero2all.base.conversation import SourceKind
from zero2all.base.units import show_bytes
from zero2all.corpus.document import Document
from zero2all.corpus.readers import MISSING_REASONS

SPLITS = ("train", "valid")
MAX_NAMES_PER_REASON = 20  # of skipped files
MAX_REASONS = 4  # that are printed for each source; the manifest has all
MAX_NAMES = 3  # of files that are printed, for each reason


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
    """Dropped documents by reason."""
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
    """Skipped files by reason."""
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
    """Shards by split and source."""
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


def summary_lines(corpus: BuiltCorpus) -> list[str]:
    """A line for each source, and one more for what was skipped or dropped of it."""
    lines = []
    for source, train_part in corpus.splits["train"].items():
        valid_part = corpus.splits["valid"][source]
        lines.append(
            f"{source}: {count_text(train_part.documents, 'document')}, {show_bytes(train_part.bytes)}; "
            f"validation {valid_part.documents}, {show_bytes(valid_part.bytes)}"
        )
        dropped = {reason: part.documents for reason, part in corpus.sources[source].dropped.items()}
        if reasons := reasons_text(corpus.left_out[source], dropped):
            lines.append(f"  skipped: {reasons}")
    return lines


def reasons_text(skipped: SkippedBySource, dropped: Mapping[str, int]) -> str:
    """Why records, files and documents of a source are not in the corpus: first what an installation would change, then
    the most frequent reasons.

    ``dropped`` counts documents by reason. Empty if everything is in the corpus.
    """
    counted = [
        (count, "record", reason, skipped.record_files.get(reason)) for reason, count in skipped.documents.items()
    ]
    counted += [(files.count, "file", reason, files) for reason, files in skipped.files.items()]
    counted += [(count, "document", reason, None) for reason, count in dropped.items()]
    counted.sort(key=lambda one: (one[2] not in MISSING_REASONS, -one[0]))
    texts = [
        f"{count_text(count, what)} ({reason}{_names_text(files)})"
        for count, what, reason, files in counted[:MAX_REASONS]
    ]
    if len(counted) > MAX_REASONS:
        texts.append("and more in documents/manifest.json")
    advice = any(what == "file" and reason.startswith("format ") for _, what, reason, _ in counted)
    return ", ".join(texts) + ("; convert files of such a format to text first" if advice else "")


def count_text(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _names_text(files: SkippedFiles | None) -> str:
    if files is None or not files.first:
        return ""
    more = ", ..." if files.count > MAX_NAMES else ""
    return f": {', '.join(files.first[:MAX_NAMES])}{more}"
