"""Counts of the documents of one part: read, skipped, changed, dropped."""

from __future__ import annotations

from collections import Counter

from zero2all.corpus.document import Document
from zero2all.corpus.manifest import DroppedDocuments, Example, ReadCounts, SkippedFiles
from zero2all.corpus.readers import BrokenRecord

MAX_DROPPED_EXAMPLES_PER_PART = 3  # of dropped documents, per reason and part, for the report
EXAMPLE_CHARACTERS = 400
MAX_QUARANTINED_PER_PART = 100  # of broken records, per part


class FileStats:
    """Counts over the files of a part, which are read one after the other."""

    def __init__(self) -> None:
        self.begin_file("")
        self._documents_read = self._bytes_read = self.unpacked = 0
        self.skipped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.record_files: dict[str, SkippedFiles] = {}
        self.unreadable: dict[str, SkippedFiles] = {}
        self.quarantine: list[str] = []
        self.dropped: dict[str, DroppedDocuments] = {}

    @property
    def read(self) -> ReadCounts:
        return ReadCounts(self._documents_read, self._bytes_read)

    def count_read(self, documents: int, size: int) -> None:
        self._documents_read += documents
        self._bytes_read += size

    def begin_file(self, name: str) -> None:
        self._file, self._file_reasons = name, set[str]()

    def count_unreadable(self, reason: str) -> None:
        self.unreadable.setdefault(reason, SkippedFiles()).add([self._file])

    def count_skipped(self, reason: str, records: int = 1) -> None:
        self.skipped[reason] += records
        if reason not in self._file_reasons:
            self._file_reasons.add(reason)
            self.record_files.setdefault(reason, SkippedFiles()).add([self._file])

    def count_broken(self, record: BrokenRecord, place: str) -> None:
        self.count_skipped(record.reason)
        if len(self.quarantine) < MAX_QUARANTINED_PER_PART:
            self.quarantine.append(f"{record.place or place}: {record.reason}")


def count_drop(dropped: dict[str, DroppedDocuments], document: Document, reason: str) -> None:
    """Count a dropped document under its reason; the first few are kept as examples."""
    of_reason = dropped.setdefault(reason, DroppedDocuments())
    of_reason.documents += 1
    of_reason.bytes += len(document.content.encode())
    if len(of_reason.samples) < MAX_DROPPED_EXAMPLES_PER_PART:
        of_reason.samples.append(Example.from_document(document, EXAMPLE_CHARACTERS))
