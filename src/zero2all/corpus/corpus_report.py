"""``z2a corpus report``: what is in a corpus and why the rest was dropped, as data and as one page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq

from zero2all.console import progress
from zero2all.corpus.document import Document
from zero2all.corpus.filters import classify_text
from zero2all.corpus.manifest import CorpusManifest, Example, SkippedBySource, SourceCounts, SplitShards
from zero2all.io import MANIFEST, read_manifest
from zero2all.paths import arrow_source
from zero2all.records import parse_record

MAX_DOCUMENTS_PER_SOURCE = 20_000  # of each source; enough for every statistic here
EXCERPT_CHARACTERS = 300
MAX_EXAMPLES = 12
_URL = re.compile(r"https?://[^\s\"'<>]+")


@dataclass(frozen=True)
class LengthStats:
    """Characters of a source's documents."""

    median: int
    longest: int
    histogram: list[tuple[int, int]]
    """Upper edge of each bin, and its documents."""


@dataclass(frozen=True)
class Outlier:
    """A kept document worth a look."""

    why: str
    gid: str
    title: str
    text: str


@dataclass(frozen=True)
class SourceStatistics:
    """Statistics of what was kept of a source."""

    looked_at: int
    characters: LengthStats
    kinds: dict[str, int]
    domains: dict[str, int]
    kept_samples: list[Example]
    suspicious: list[Outlier]


@dataclass(frozen=True)
class CorpusReport:
    """The flow of documents and bytes through every step, and statistics of what was kept, by source."""

    directory: str
    documents: int
    bytes: int
    splits: dict[str, dict[str, SplitShards]]
    sources: dict[str, SourceCounts]
    left_out: dict[str, SkippedBySource]
    statistics: dict[str, SourceStatistics]


def corpus_report(directory: Path) -> CorpusReport:
    manifest = parse_record(
        CorpusManifest, read_manifest(directory, "documents", "z2a corpus build RECIPE"), directory / MANIFEST
    )
    train = manifest.splits["train"]
    statistics = {}
    with progress("reading documents", sum(part.documents for part in train.values())) as advance:
        for source, part in train.items():
            shards = [directory / "train" / shard for shard in part.shards]
            statistics[source] = _statistics(_documents(shards), advance)
    return CorpusReport(
        directory=str(directory),
        documents=manifest.documents,
        bytes=manifest.bytes,
        splits=manifest.splits,
        sources=manifest.sources,
        left_out=manifest.left_out,
        statistics=statistics,
    )


def _documents(shards: list[Path]) -> Iterator[Document]:
    taken = 0
    for shard in shards:
        with pq.ParquetFile(arrow_source(shard)) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    if taken == MAX_DOCUMENTS_PER_SOURCE:
                        return
                    taken += 1
                    yield Document(**row)


def _statistics(documents: Iterator[Document], advance: Callable[[float], None]) -> SourceStatistics:
    lengths: list[int] = []
    kinds: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    kept: list[Example] = []
    suspicious: list[tuple[float, str, Document]] = []
    for document in documents:
        lengths.append(len(document.content))
        kinds[classify_text(document)] += 1
        domain = _domain(document)
        if domain:
            domains[domain] += 1
        if len(kept) < MAX_EXAMPLES:
            kept.append(Example.from_document(document, EXCERPT_CHARACTERS))
        score, why = _outlier_score(document)
        if score > 0:
            suspicious.append((score, why, document))
        advance(1)
    suspicious.sort(key=lambda outlier: (-outlier[0], outlier[2].gid))
    edges = [0, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1 << 62]
    counts, _ = np.histogram(lengths, bins=edges)
    return SourceStatistics(
        looked_at=len(lengths),
        characters=LengthStats(
            median=int(np.median(lengths)) if lengths else 0,
            longest=max(lengths, default=0),
            histogram=[(edge, int(count)) for edge, count in zip(edges[1:], counts, strict=True)],
        ),
        kinds=dict(kinds.most_common()),
        domains=dict(domains.most_common(MAX_EXAMPLES)),
        kept_samples=kept,
        suspicious=[
            Outlier(why, document.gid, document.title, document.content[:EXCERPT_CHARACTERS])
            for _, why, document in suspicious[:MAX_EXAMPLES]
        ],
    )


def _domain(document: Document) -> str:
    if not document.others:
        return ""
    others = json.loads(document.others)
    address = next((others[name] for name in ("url", "source_url", "link") if isinstance(others.get(name), str)), "")
    return urlsplit(address).hostname or "" if address else ""


def _outlier_score(document: Document) -> tuple[float, str]:
    """Outlier score of a kept document, and why. For manual inspection, not for a filter to act on."""
    text = document.content
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) >= 20 and (share := 1 - len(set(lines)) / len(lines)) > 0.5:
        return share, f"{100 * share:.0f} % of its lines are repeats"
    if len(text) >= 1000 and (variety := len(set(text)) / len(text) ** 0.5) < 0.5:
        return 1 - variety, f"only {len(set(text))} different characters in {len(text)}"
    damaged = sum(text.count(mark) for mark in ("\ufffd", "锟斤拷", "Ã", "â€"))
    if damaged > 3:
        return min(0.9, damaged / len(text) * 50), f"{damaged} marks of broken encoding"
    links = sum(len(match) for match in _URL.findall(text)) / max(1, len(text))
    return (links, f"{100 * links:.0f} % of it are links") if links > 0.4 else (0.0, "")
