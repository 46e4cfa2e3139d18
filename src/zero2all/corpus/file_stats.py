"""Counts of one file's documents: read, skipped, changed, dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zero2all.corpus.document import Document
from zero2all.corpus.readers import BrokenRecord

MAX_DROPPED_EXAMPLES_PER_PART = 3  # of dropped documents, per reason and part, for the report
EXAMPLE_CHARACTERS = 400
MAX_QUARANTINED_PER_PART = 100  # of broken records, per part


class FileStats:
    def __init__(self) -> None:
        self.documents_read = self.bytes_read = 0
        self.skipped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.unreadable: str | None = None
        self._quarantine: list[str] = []
        self.dropped: dict[str, dict[str, Any]] = {}

    def count_read(self, documents: int, size: int) -> None:
        self.documents_read += documents
        self.bytes_read += size

    def count_broken(self, record: BrokenRecord, place: str) -> None:
        self.skipped[record.reason] += 1
        if len(self._quarantine) < MAX_QUARANTINED_PER_PART:
            self._quarantine.append(f"{record.place or place}: {record.reason}")

    def summary(self) -> dict[str, Any]:
        return {
            "read": {"documents": self.documents_read, "bytes": self.bytes_read},
            "left_out": dict(self.skipped),
            "quarantine": self._quarantine,
            "unreadable": self.unreadable,
            "changed": dict(self.changed),
            "dropped": self.dropped,
        }


def count_drop(dropped: dict[str, dict[str, Any]], document: Document, reason: str) -> None:
    """Count a dropped document under its reason; the first few are kept as examples."""
    of_reason = dropped.setdefault(reason, {"documents": 0, "bytes": 0, "samples": []})
    of_reason["documents"] += 1
    of_reason["bytes"] += len(document.content.encode())
    if len(of_reason["samples"]) < MAX_DROPPED_EXAMPLES_PER_PART:
        text = document.content[:EXAMPLE_CHARACTERS]
        of_reason["samples"].append({"gid": document.gid, "title": document.title, "text": text})
