"""Tokenizer metrics as a Markdown table and as a bar chart."""

from __future__ import annotations

from html import escape
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from zero2all.tokenizer.evaluate import Evaluation

COLOURS = ("#2a78b5", "#e08a2c", "#3d9a50", "#b8433f", "#7d5fb2", "#8a6652", "#c867a5", "#7d7d7d")
MAX_BAR_HEIGHT, BAR_WIDTH, GROUP_GAP = 220, 34, 40  # of the tallest bar, of a bar's width, between groups


def render_table(evaluation: Evaluation) -> str:
    """One row per metric, one column per tokenizer."""
    measured = evaluation.tokenizers
    table = Table(box=MARKDOWN)
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right", no_wrap=True)
    first = next(iter(measured.values()))
    table.add_row("vocabulary", *(f"{one.vocab_size:,}" for one in measured.values()))
    for domain in first.domains:
        parts = [one.domains[domain] for one in measured.values()]
        table.add_row(f"{domain}: bytes per token", *(f"{part.bytes_per_token:.3f}" for part in parts))
        table.add_row(f"{domain}: tokens per character", *(f"{part.tokens_per_character:.3f}" for part in parts))
        table.add_row(f"{domain}: documents that round-trip", *(_percent(part.documents_back) for part in parts))
    for probe in first.tokens_per_word:
        values = (one.tokens_per_word[probe] for one in measured.values())
        table.add_row(f"tokens per word, {probe}", *(f"{value:.2f}" for value in values))
    table.add_row("tokens unused by these texts", *(f"{one.unused_tokens:,}" for one in measured.values()))
    table.add_row("random bytes that round-trip", *(_percent(one.random_bytes_back) for one in measured.values()))
    out = StringIO()
    Console(file=out, width=10_000, color_system=None).print(table)
    return "\n".join(line for line in map(str.rstrip, out.getvalue().splitlines()) if line)


def _percent(value: float) -> str:
    return f"{100 * value:.5g} %"


def render_svg(evaluation: Evaluation) -> str:
    """Bytes per token of each domain, one bar per tokenizer: the higher, the fewer tokens for the same text."""
    measured = evaluation.tokenizers
    domains = list(next(iter(measured.values())).domains)
    largest = max(part.bytes_per_token for one in measured.values() for part in one.domains.values())
    group = BAR_WIDTH * len(measured) + GROUP_GAP
    width = max(480, 40 + group * len(domains))
    base = 70 + MAX_BAR_HEIGHT
    parts = [f'<line x1="20" y1="{base}" x2="{width - 20}" y2="{base}" stroke="#888"/>']
    for position, domain in enumerate(domains):
        left = 40 + position * group
        middle = left + BAR_WIDTH * len(measured) / 2
        parts.append(f'<text x="{middle}" y="{base + 20}" text-anchor="middle">{escape(domain)}</text>')
        for number, (name, one) in enumerate(measured.items()):
            value = one.domains[domain].bytes_per_token
            tall, x, colour = (
                MAX_BAR_HEIGHT * value / largest,
                left + number * BAR_WIDTH,
                COLOURS[number % len(COLOURS)],
            )
            title = escape(f"{name}, {domain}: {value}")
            parts.append(
                f'<rect x="{x + 2}" y="{base - tall:.1f}" width="{BAR_WIDTH - 4}" height="{tall:.1f}" fill="{colour}">'
                f"<title>{title}</title></rect>"
                f'<text x="{x + BAR_WIDTH / 2}" y="{base - tall - 5:.1f}" text-anchor="middle" font-size="11">'
                f"{value:.2f}"
                "</text>"
            )
    for number, name in enumerate(measured):
        y = base + 48 + 20 * number
        parts.append(f'<rect x="40" y="{y - 11}" width="14" height="14" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="62" y="{y}">{escape(name)}</text>')
    height = base + 60 + 20 * len(measured)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, Noto Sans CJK SC, sans-serif" font-size="13" fill="#222">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="20" y="30" font-size="16">Bytes of text per token (more is better)</text>{"".join(parts)}</svg>\n'
    )
