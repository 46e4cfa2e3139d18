"""``z2a tokenizer eval``: compare tokenizers on text, also tokenizers of other projects, as a table and as a chart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import tokenizers
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from zero2all.base.charts.svg import Bar, bar_svg
from zero2all.base.console import progress
from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json
from zero2all.base.package_data import read_package_table

RANDOM_STRINGS = 2000
BATCH_TEXTS = 64
PROBES: dict[str, list[str]] = read_package_table(__package__, "probes.toml")


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer of any kind, without its special tokens."""

    tokenizer: tokenizers.Tokenizer
    text_ids: frozenset[int]
    vocab_size: int

    @classmethod
    def load(cls, path: Path) -> PlainTokenizer:
        """From a Hugging Face directory, or a ``tokenizer.json``."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise Z2aError(f"no tokenizer in {path}: give a directory with a tokenizer.json, or such a file")
        definition = read_json(file)
        full = tokenizers.Tokenizer.from_file(str(file))
        special = {token["content"] for token in definition["added_tokens"] if token["special"]}
        kept = [token for token in definition["added_tokens"] if not token["special"]]
        return cls(
            tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": kept})),
            frozenset(id for token, id in full.get_vocab().items() if token not in special),
            full.get_vocab_size(),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def round_trips(self, text: str, ids: list[int]) -> bool:
        return bool(self.tokenizer.decode(ids, skip_special_tokens=False) == text)


@dataclass(frozen=True)
class DomainMetrics:
    """A tokenizer on the text of one domain."""

    documents: int
    bytes: int
    tokens: int
    bytes_per_token: float
    tokens_per_character: float
    documents_back: float
    """Fraction of the documents that round-trip."""


@dataclass(frozen=True)
class TokenizerMetrics:
    path: str
    vocab_size: int
    domains: dict[str, DomainMetrics]
    tokens_per_word: dict[str, float]
    """Tokens per word by kind of word."""
    unused_tokens: int
    """Tokens that occur in no text."""
    random_bytes_back: float
    """Fraction of random byte strings that round-trip."""


@dataclass(frozen=True)
class TokenizerEvaluation:
    tokenizers: dict[str, TokenizerMetrics]


def evaluate_tokenizers(paths: Mapping[str, Path], texts: Mapping[str, Sequence[str]]) -> TokenizerEvaluation:
    """Metrics of each tokenizer on each domain of text, and on fixed names, numbers and code."""
    loaded = {name: PlainTokenizer.load(path) for name, path in paths.items()}
    for domain, documents in texts.items():
        if not any(documents):
            raise Z2aError(f"there is no text in {domain}: give --text {domain}=PATH a file that has some")
    total = sum(len(text) for documents in texts.values() for text in documents) * len(loaded)
    measured = {}
    with progress("encoding", total) as advance:
        for name, tokenizer in loaded.items():
            used: set[int] = set()
            domains = {
                domain: _measure_domain(tokenizer, documents, used, advance) for domain, documents in texts.items()
            }
            measured[name] = TokenizerMetrics(
                path=str(paths[name]),
                vocab_size=tokenizer.vocab_size,
                domains=domains,
                tokens_per_word={probe: _fertility(tokenizer, words) for probe, words in PROBES.items()},
                unused_tokens=len(tokenizer.text_ids - used),
                random_bytes_back=_random_bytes_round_trip(tokenizer),
            )
    return TokenizerEvaluation(measured)


def _measure_domain(
    tokenizer: PlainTokenizer, documents: Sequence[str], used: set[int], advance: Callable[[float], None]
) -> DomainMetrics:
    tokens = round_trips = 0
    for start in range(0, len(documents), BATCH_TEXTS):
        batch = documents[start : start + BATCH_TEXTS]
        for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
            tokens += len(ids)
            used.update(ids)
            round_trips += tokenizer.round_trips(text, ids)
        advance(sum(map(len, batch)))
    size, characters = sum(len(text.encode()) for text in documents), sum(map(len, documents))
    return DomainMetrics(
        documents=len(documents),
        bytes=size,
        tokens=tokens,
        bytes_per_token=round(size / tokens, 4),
        tokens_per_character=round(tokens / characters, 4),
        documents_back=round(round_trips / len(documents), 6),
    )


def _fertility(tokenizer: PlainTokenizer, words: Sequence[str]) -> float:
    return round(sum(map(len, tokenizer.encode(words))) / len(words), 3)


def _random_bytes_round_trip(tokenizer: PlainTokenizer) -> float:
    """Fraction of random byte strings, decoded as text, that survive a round trip."""
    rng = random.Random(0)
    texts = [rng.randbytes(rng.randint(1, 60)).decode("utf-8", "replace") for _ in range(RANDOM_STRINGS)]
    encoded = tokenizer.encode(texts)
    return sum(map(tokenizer.round_trips, texts, encoded)) / len(texts)


def render_table(evaluation: TokenizerEvaluation) -> str:
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
    return f"{100 * value:.5g}%"


def render_svg(evaluation: TokenizerEvaluation) -> str:
    """Bytes per token of each domain, one bar per tokenizer: the higher, the fewer tokens for the same text."""
    measured = evaluation.tokenizers
    bars = [
        Bar(domain, value, f"{value:.2f}", number)
        for domain in next(iter(measured.values())).domains
        for number, one in enumerate(measured.values())
        for value in [one.domains[domain].bytes_per_token]
    ]
    return bar_svg("Bytes of text per token (more is better)", bars, list(measured))
