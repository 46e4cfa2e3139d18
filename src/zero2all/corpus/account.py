"""What became of the documents of one file: read, left out, changed, dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zero2all.corpus.document import Document
from zero2all.corpus.readers import BrokenRecord

SAMPLES_KEPT = 3  # of dropped documents, per reason and part, for the report
SAMPLE_CHARACTERS = 400
PLACES_KEPT = 100  # of broken records, per part


class Account:
    def __init__(self) -> None:
        self.read_documents = self.read_bytes = 0
        self.left_out: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.unreadable: str | None = None
        self._places: list[str] = []
        self.dropped: dict[str, dict[str, Any]] = {}

    def read(self, documents: int, size: int) -> None:
        self.read_documents += documents
        self.read_bytes += size

    def broken(self, record: BrokenRecord, place: str) -> None:
        self.left_out[record.reason] += 1
        if len(self._places) < PLACES_KEPT:
            self._places.append(f"{record.place or place}: {record.reason}")

    def summary(self) -> dict[str, Any]:
        return {
            "read": {"documents": self.read_documents, "bytes": self.read_bytes},
            "left_out": dict(self.left_out),
            "quarantine": self._places,
            "unreadable": self.unreadable,
            "changed": dict(self.changed),
            "dropped": self.dropped,
        }


def count_drop(dropped: dict[str, dict[str, Any]], document: Document, reason: str) -> None:
    """Add a document to the account of a reason; the first few are kept to be looked at."""
    of_reason = dropped.setdefault(reason, {"documents": 0, "bytes": 0, "samples": []})
    of_reason["documents"] += 1
    of_reason["bytes"] += len(document.content.encode())
    if len(of_reason["samples"]) < SAMPLES_KEPT:
        text = document.content[:SAMPLE_CHARACTERS]
        of_reason["samples"].append({"gid": document.gid, "title": document.title, "text": text})
