"""``z2a corpus report``: what is in a corpus and why the rest was dropped, as data and as an HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq

from zero2all.base.charts.page import html_page
from zero2all.base.charts.svg import Bar, Link, bar_svg, sankey_svg
from zero2all.base.console import progress
from zero2all.base.io import MANIFEST
from zero2all.base.manifest import read_manifest
from zero2all.base.paths import arrow_source
from zero2all.base.records import parse_record
from zero2all.base.units import show_bytes, show_count, show_number
from zero2all.corpus.document import Document
from zero2all.corpus.filters import classify_text
from zero2all.corpus.manifest import CorpusManifest, Example, SkippedBySource, SkippedFiles, SourceCounts, SplitShards

MAX_DOCUMENTS_PER_SOURCE = 20_000  # of each source; enough for every statistic here
EXCERPT_CHARACTERS = 300
MAX_EXAMPLES = 12


@dataclass(frozen=True)
class LengthStats:
    """Characters of a source's documents."""

    median: int
    longest: int
    histogram: list[tuple[int, int]]
    """Upper edge of each bin, and its documents."""


@dataclass(frozen=True)
class SourceStatistics:
    """Statistics of what was kept of a source."""

    looked_at: int
    characters: LengthStats
    kinds: dict[str, int]
    domains: dict[str, int]
    kept_samples: list[Example]


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
    for document in documents:
        lengths.append(len(document.content))
        kinds[classify_text(document)] += 1
        domain = _domain(document)
        if domain:
            domains[domain] += 1
        if len(kept) < MAX_EXAMPLES:
            kept.append(Example.from_document(document, EXCERPT_CHARACTERS))
        advance(1)
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
    )


def _domain(document: Document) -> str:
    if not document.others:
        return ""
    others = json.loads(document.others)
    address = next((others[name] for name in ("url", "source_url", "link") if isinstance(others.get(name), str)), "")
    return urlsplit(address).hostname or "" if address else ""


MIN_FLOW_SHARE = 0.004  # of all bytes; a thinner band is invisible
STYLE = """
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
@media (max-width: 45rem) { .pair { grid-template-columns: 1fr } }
pre { background: var(--soft); padding: .6rem; margin: .3rem 0; max-height: 12rem; overflow: auto; font-size: 13px }
"""


def report_html(report: CorpusReport) -> str:
    body = [
        f"<h1>{show_count(report.documents)} documents, {show_bytes(report.bytes)}</h1>",
        f"<small>{escape(report.directory)}</small>",
        "<h2>Where the text went</h2>",
        sankey_svg(flows(report)),
        "<h2>Sources</h2>",
        _sources_table(report),
        *(
            _source_section(name, counts, report.left_out[name], report.statistics[name])
            for name, counts in report.sources.items()
        ),
    ]
    return html_page("Corpus report", "\n".join(body), STYLE)


def flows(report: CorpusReport) -> list[Link]:
    """(source, outcome, bytes): every byte that was read goes somewhere."""
    found = []
    for source, counts in report.sources.items():
        for reason, dropped in counts.dropped.items():
            found.append((source, reason, dropped.bytes))
        for split, label in (("train", "kept: train"), ("valid", "kept: validation")):
            found.append((source, label, report.splits[split][source].bytes))
        outcome = sum(size for name, _, size in found if name == source)
        if counts.read.bytes > outcome:  # what filters removed from documents that were kept
            found.append((source, "removed inside documents", counts.read.bytes - outcome))
    return _merge_small_flows([flow for flow in found if flow[2] > 0])


def _merge_small_flows(links: list[Link]) -> list[Link]:
    """Outcomes too thin to see are drawn as one."""
    least = MIN_FLOW_SHARE * sum(size for _, _, size in links)
    sizes: dict[str, int] = {}
    for _, outcome, size in links:
        sizes[outcome] = sizes.get(outcome, 0) + size
    lumped: dict[tuple[str, str], int] = {}
    for source, outcome, size in links:
        label = outcome if sizes[outcome] >= least or outcome.startswith("kept") else "other reasons"
        lumped[source, label] = lumped.get((source, label), 0) + size
    return [(source, outcome, size) for (source, outcome), size in lumped.items()]


def _sources_table(report: CorpusReport) -> str:
    rows = ["<tr><th>source<th>files<th>read<th>bytes<th>kept<th>validation<th>kept bytes<th>median length</tr>"]
    for name, counts in report.sources.items():
        train, valid, read = report.splits["train"][name], report.splits["valid"][name], counts.read
        kept = train.bytes + valid.bytes
        share = kept / max(1, read.bytes)
        cells = [counts.files, read.documents, show_bytes(read.bytes), train.documents, valid.documents]
        cells += [f"{show_bytes(kept)} ({100 * share:.1f}%)", report.statistics[name].characters.median]
        rows.append(f"<tr><td>{escape(name)}" + "".join(f"<td>{cell}" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _source_section(name: str, counts: SourceCounts, skipped: SkippedBySource, statistics: SourceStatistics) -> str:
    parts = [
        f"<h2>{escape(name)}</h2>",
        _histogram(statistics.characters.histogram),
        _counts_html("kinds of text", statistics.kinds),
        _counts_html("top domains", statistics.domains),
        _skipped_html("skipped records", "records", counts.left_out, skipped.record_files),
        _skipped_html(
            "skipped files", "files", {why: found.count for why, found in skipped.files.items()}, skipped.files
        ),
        _counts_html("changed by", counts.changed),
    ]
    if counts.dropped:
        rows = [
            f"<tr><td>{escape(reason)}<td>{dropped.documents}<td>{show_bytes(dropped.bytes)}</tr>"
            for reason, dropped in sorted(counts.dropped.items(), key=lambda item: -item[1].bytes)
        ]
        parts.append(f"<table><tr><th>dropped because<th>documents<th>bytes</tr>{''.join(rows)}</table>")
    parts.append('<div class="pair"><div><h3>kept</h3>')
    parts += [_example_html(sample, "") for sample in statistics.kept_samples[:6]]
    parts.append("</div><div><h3>dropped</h3>")
    parts += [
        _example_html(sample, reason) for reason, dropped in counts.dropped.items() for sample in dropped.samples[:2]
    ]
    parts.append("</div></div>")
    return "\n".join(parts)


def _example_html(sample: Example, why: str) -> str:
    head = f"<b>{escape(why)}</b> " if why else ""
    return f"<small>{head}{escape(sample.title[:100])} {sample.gid[:12]}</small><pre>{escape(sample.text)}</pre>"


def _counts_html(title: str, counts: dict[str, int]) -> str:
    if not counts:
        return ""
    listed = ", ".join(f"{escape(str(name))} {count}" for name, count in counts.items())
    return f"<p><small>{title}:</small> {listed}</p>"


def _skipped_html(title: str, what: str, counts: dict[str, int], files: dict[str, SkippedFiles]) -> str:
    """A table of reasons, each with its count and the names of the first files."""
    if not counts:
        return ""
    rows = []
    for reason, count in counts.items():
        names = files.get(reason, SkippedFiles())
        more = ", ..." if names.count > len(names.first) else ""
        rows.append(f"<tr><td>{escape(reason)}<td>{count}<td>{escape(', '.join(names.first))}{more}</tr>")
    return f"<table><tr><th>{title}<th>{what}<th>files, the first ones</tr>{''.join(rows)}</table>"


def _histogram(counts: list[tuple[int, int]]) -> str:
    bars = [
        Bar("more" if edge > 10**9 else f"up to {show_number(edge)}", count, f"{count:,}") for edge, count in counts
    ]
    return bar_svg("Characters per document", bars, inline=True)
