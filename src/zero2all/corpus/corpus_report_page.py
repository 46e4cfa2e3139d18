"""The report as one HTML page with everything inside it: no script, no network, ready to attach to an issue."""

from __future__ import annotations

from html import escape

from zero2all.corpus.corpus_report import CorpusReport, Outlier, SourceStatistics
from zero2all.corpus.manifest import Example, SkippedBySource, SkippedFiles, SourceCounts
from zero2all.units import show_bytes, show_count

MIN_FLOW_SHARE = 0.004  # of all bytes; a thinner band is invisible
LABEL_HEIGHT = 16
COLOURS = ("#2a78b5", "#e08a2c", "#3d9a50", "#b8433f", "#7d5fb2", "#8a6652", "#c867a5", "#7d7d7d", "#a5a52a", "#2aa3a5")
STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8881; }
body { font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse; width: 100% } td, th { padding: .25rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) td { background: var(--soft) }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
@media (max-width: 45rem) { .pair { grid-template-columns: 1fr } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6rem; margin: .3rem 0;
      max-height: 12rem; overflow: auto; font-size: 13px }
small { opacity: .75 } svg text { fill: currentColor; font-size: 13px } .bar { fill: #2a78b5 }
"""


def report_html(report: CorpusReport) -> str:
    body = [
        f"<h1>{show_count(report.documents)} documents, {show_bytes(report.bytes)}</h1>",
        f"<small>{escape(report.directory)}</small>",
        "<h2>Where the text went</h2>",
        sankey(flows(report)),
        "<h2>Sources</h2>",
        _sources_table(report),
        *(
            _source_section(name, counts, report.left_out[name], report.statistics[name])
            for name, counts in report.sources.items()
        ),
    ]
    page = "\n".join(body)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Corpus report</title><style>{STYLE}</style><body>{page}</body></html>"
    )


def flows(report: CorpusReport) -> list[tuple[str, str, int]]:
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


def _merge_small_flows(links: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
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


def sankey(links: list[tuple[str, str, int]], width: int = 1000, height: int = 460) -> str:
    """Sources on the left, outcomes on the right, bands as wide as their bytes."""
    total = sum(size for _, _, size in links) or 1
    left = _stack(links, 0, total, height)
    right = _stack(links, 1, total, height)
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(left)}
    used = {
        **{("l", name): top for name, (top, _) in left.items()},
        **{("r", name): top for name, (top, _) in right.items()},
    }
    shapes = []
    x0, x1 = 150, width - 330
    for source, outcome, size in sorted(
        links, key=lambda link: (list(left).index(link[0]), list(right).index(link[1]))
    ):
        thick = (height - 60) * size / total
        y0, y1 = used["l", source], used["r", outcome]
        used["l", source] += thick
        used["r", outcome] += thick
        middle = (x0 + x1) / 2
        path = (
            f"M{x0},{y0:.1f} C{middle},{y0:.1f} {middle},{y1:.1f} {x1},{y1:.1f} v{thick:.1f} "
            f"C{middle},{y1 + thick:.1f} {middle},{y0 + thick:.1f} {x0},{y0 + thick:.1f} Z"
        )
        title = f"{source} → {outcome}: {show_bytes(size)}"
        shapes.append(f'<path d="{path}" fill="{colour[source]}" opacity=".55"><title>{escape(title)}</title></path>')
    labels = [
        _label(x0 - 8, top, thick, name, thick / (height - 60) * total, "end") for name, (top, thick) in left.items()
    ]
    middles = _spaced_middles(right)
    labels += [
        _label(x1 + 8, middles[name], 0, name, thick / (height - 60) * total, "start")
        for name, (_, thick) in right.items()
    ]
    tall = max([height, *(middle + LABEL_HEIGHT for middle in middles.values())])
    return f'<svg viewBox="0 0 {width} {tall:.0f}" role="img">{"".join(shapes)}{"".join(labels)}</svg>'


def _stack(links: list[tuple[str, str, int]], side: int, total: int, height: int) -> dict[str, tuple[float, float]]:
    """Top and thickness of each name on one side, largest first, with gaps between them."""
    sizes: dict[str, int] = {}
    for link in links:
        name = str(link[side])
        sizes[name] = sizes.get(name, 0) + link[2]
    gap = 60 / max(1, len(sizes))
    at = gap / 2
    placed = {}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        thick = (height - 60) * size / total
        placed[name] = (at, thick)
        at += thick + gap
    return placed


def _label(x: float, top: float, thick: float, name: str, size: float, anchor: str) -> str:
    return (
        f'<text x="{x}" y="{top + thick / 2 + 4:.1f}" text-anchor="{anchor}">{escape(name)} '
        f"<tspan opacity='.7'>{show_bytes(round(size))}</tspan></text>"
    )


def _spaced_middles(placed: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Thin bands lie closer than their labels are high, so labels are pushed down until they fit."""
    middles: dict[str, float] = {}
    lowest = 0.0
    for name, (top, thick) in placed.items():
        middles[name] = lowest = max(top + thick / 2, lowest + LABEL_HEIGHT)
    return middles


def _sources_table(report: CorpusReport) -> str:
    rows = ["<tr><th>source<th>files<th>read<th>bytes<th>kept<th>validation<th>kept bytes<th>median length</tr>"]
    for name, counts in report.sources.items():
        train, valid, read = report.splits["train"][name], report.splits["valid"][name], counts.read
        kept = train.bytes + valid.bytes
        share = kept / max(1, read.bytes)
        cells = [counts.files, read.documents, show_bytes(read.bytes), train.documents, valid.documents]
        cells += [f"{show_bytes(kept)} ({100 * share:.1f} %)", report.statistics[name].characters.median]
        rows.append(f"<tr><td>{escape(name)}" + "".join(f"<td>{cell}" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _source_section(name: str, counts: SourceCounts, skipped: SkippedBySource, statistics: SourceStatistics) -> str:
    parts = [
        f"<h2>{escape(name)}</h2>",
        _histogram_svg("characters a document, up to", statistics.characters.histogram),
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
    if statistics.suspicious:
        parts.append("<h3>kept, but outliers</h3>")
        parts += [_example_html(outlier, outlier.why) for outlier in statistics.suspicious]
    return "\n".join(parts)


def _example_html(sample: Example | Outlier, why: str) -> str:
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


def _histogram_svg(title: str, histogram: list[tuple[int, int]]) -> str:
    most = max((count for _, count in histogram), default=0) or 1
    bars = []
    for number, (edge, count) in enumerate(histogram):
        tall = 70 * count / most
        label = "more" if edge > 10**9 else show_count(edge).replace(".00", "")
        bars.append(f'<rect class="bar" x="{number * 70 + 5}" y="{80 - tall:.1f}" width="56" height="{tall:.1f}"/>')
        bars.append(f'<text x="{number * 70 + 33}" y="96" text-anchor="middle">{label}</text>')
        bars.append(f'<text x="{number * 70 + 33}" y="{76 - tall:.1f}" text-anchor="middle">{count or ""}</text>')
    return f'<p><small>{title}</small></p><svg viewBox="0 -14 660 114" style="max-width: 42rem">{"".join(bars)}</svg>'
