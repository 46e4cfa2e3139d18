"""Tokenizer metrics as a Markdown table and as a bar chart."""

from __future__ import annotations

from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from zero2all.charts.svg import Bar, bar_svg
from zero2all.tokenizer.evaluate import Evaluation


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
    bars = [
        Bar(domain, value, f"{value:.2f}", number)
        for domain in next(iter(measured.values())).domains
        for number, one in enumerate(measured.values())
        for value in [one.domains[domain].bytes_per_token]
    ]
    return bar_svg("Bytes of text per token (more is better)", bars, list(measured))
