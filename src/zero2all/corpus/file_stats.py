"""Counts of one file's documents: read, skipped, changed, dropped."""

from __future__ import annotations

from collections import Counter

from zero2all.corpus.document import Document
from zero2all.corpus.manifest import DroppedDocuments, Example, ReadCounts
from zero2all.corpus.readers import BrokenRecord

MAX_DROPPED_EXAMPLES_PER_PART = 3  # of dropped documents, per reason and part, for the report
EXAMPLE_CHARACTERS = 400
MAX_QUARANTINED_PER_PART = 100  # of broken records, per part


class FileStats:
    def __init__(self) -> None:
        self._documents_read = self._bytes_read = 0
        self.skipped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.unreadable: str | None = None
        self.quarantine: list[str] = []
        self.dropped: dict[str, DroppedDocuments] = {}

    @property
    def read(self) -> ReadCounts:
        return ReadCounts(self._documents_read, self._bytes_read)

    def count_read(self, documents: int, size: int) -> None:
        self._documents_read += documents
        self._bytes_read += size

    def count_broken(self, record: BrokenRecord, place: str) -> None:
        self.skipped[record.reason] += 1
        if len(self.quarantine) < MAX_QUARANTINED_PER_PART:
            self.quarantine.append(f"{record.place or place}: {record.reason}")


def count_drop(dropped: dict[str, DroppedDocuments], document: Document, reason: str) -> None:
    """Count a dropped document under its reason; the first few are kept as examples."""
    of_reason = dropped.setdefault(reason, DroppedDocuments())
    of_reason.documents += 1
    of_reason.bytes += len(document.content.encode())
    if len(of_reason.samples) < MAX_DROPPED_EXAMPLES_PER_PART:
        of_reason.samples.append(Example.from_document(document, EXAMPLE_CHARACTERS))
