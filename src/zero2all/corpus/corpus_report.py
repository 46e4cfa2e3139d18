"""``z2a corpus report``: what is in a corpus and why the rest was dropped, as data and as one page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq

from zero2all.console import progress
from zero2all.corpus.document import Document
from zero2all.corpus.filters import classify_text
from zero2all.io import read_manifest
from zero2all.paths import arrow_source

MAX_DOCUMENTS_PER_SOURCE = 20_000  # of each source; enough for every statistic here
EXCERPT_CHARACTERS = 300
MAX_EXAMPLES = 12
_URL = re.compile(r"https?://[^\s\"'<>]+")


def corpus_report(directory: Path) -> dict[str, Any]:
    """The flow of documents and bytes through every step, and statistics of what was kept, by source."""
    manifest = read_manifest(directory, "documents", "z2a corpus build RECIPE")
    train = manifest["splits"]["train"]
    statistics = {}
    with progress("reading documents", sum(part["documents"] for part in train.values())) as advance:
        for source, part in train.items():
            shards = [directory / "train" / shard for shard in part["shards"]]
            statistics[source] = _statistics(_documents(shards), advance)
    return {
        "directory": str(directory),
        "documents": manifest["documents"],
        "bytes": manifest["bytes"],
        "splits": manifest["splits"],
        "sources": manifest["sources"],
        "left_out": manifest["left_out"],
        "statistics": statistics,
    }


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


def _statistics(documents: Iterator[Document], advance: Any) -> dict[str, Any]:
    lengths: list[int] = []
    kinds: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    kept: list[dict[str, str]] = []
    suspicious: list[tuple[float, str, Document]] = []
    for document in documents:
        lengths.append(len(document.content))
        kinds[classify_text(document)] += 1
        domain = _domain(document)
        if domain:
            domains[domain] += 1
        if len(kept) < MAX_EXAMPLES:
            kept.append(excerpt(document))
        score, why = _outlier_score(document)
        if score > 0:
            suspicious.append((score, why, document))
        advance(1)
    suspicious.sort(key=lambda outlier: (-outlier[0], outlier[2].gid))
    edges = [0, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1 << 62]
    counts, _ = np.histogram(lengths, bins=edges)
    return {
        "looked_at": len(lengths),
        "characters": {
            "median": int(np.median(lengths)) if lengths else 0,
            "longest": max(lengths, default=0),
            "histogram": [[edge, int(count)] for edge, count in zip(edges[1:], counts, strict=True)],
        },
        "kinds": dict(kinds.most_common()),
        "domains": dict(domains.most_common(MAX_EXAMPLES)),
        "kept_samples": kept,
        "suspicious": [{"why": why, **excerpt(document)} for _, why, document in suspicious[:MAX_EXAMPLES]],
    }


def excerpt(document: Document) -> dict[str, str]:
    return {"gid": document.gid, "title": document.title, "text": document.content[:EXCERPT_CHARACTERS]}


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
