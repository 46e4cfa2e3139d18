"""What pictures of docs/explain measure: stories, their tokenizers, and records of small training runs."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from zero2all.base.charts.plot import Curve
from zero2all.corpus import build_corpus
from zero2all.recipe import builtin_recipe_path, load_recipe
from zero2all.storyworld import LANGUAGES, generate_stories
from zero2all.storyworld.generate import get_language
from zero2all.storyworld.plots import cast
from zero2all.storyworld.teller import PLOT_PREFERENCE, PREFERENCE, Teller
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.track.health_checks import check_health
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

RECORDS = Path(__file__).parents[2] / "tests" / "track" / "records"
GARBAGE = Path(__file__).with_name("garbage.jsonl.gz")
T = TypeVar("T")


@cache
def unigram_by_vocabulary() -> list[tuple[int, float, float]]:
    """Vocabulary size; nats per token and bits per byte of new stories, by the frequencies of each token alone."""
    texts = {name: list(generate_stories(name, 7, 2000)) for name in LANGUAGES}
    seen, new = ([text for own in texts.values() for text in own[part]] for part in (slice(1800), slice(1800, None)))
    found = []
    with tempfile.TemporaryDirectory() as work:
        for language, own in texts.items():
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in own[:1800])
            Path(work, f"{language}.jsonl").write_text("".join(lines), encoding="utf-8")
        sources = [{"name": name, "paths": [f"{work}/{name}.jsonl"]} for name in LANGUAGES]
        for size in (320, 512, 1024, 2048, 4096):
            places = [f"out={work}/run", f"corpus.sources={json.dumps(sources)}", f"corpus.dir={work}/documents",
                      f"tokenizer.dir={work}/tokenizer-{size}", f"tokenizer.vocab_size={size}"]  # fmt: skip
            recipe = load_recipe(builtin_recipe_path("stories.yaml"), places)
            build_corpus(recipe.corpus, recipe.documents_dir)
            train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
            tokenizer = Tokenizer(recipe.tokenizer_dir)
            counts = Counter(token for text in seen for token in tokenizer.encode(text))
            ids = [token for text in new for token in tokenizer.encode(text)]
            total = counts.total() + size
            nats = -sum(math.log((counts[token] + 1) / total) for token in ids)
            found.append((size, nats / len(ids), nats / math.log(2) / sum(len(text.encode()) for text in new)))
    return found


class CountingTeller(Teller):
    """Adds up how improbable its choices are, in bits."""

    bits = 0.0

    def choose(self, options: Sequence[T]) -> T:
        self.bits += math.log2(len(options))
        return super().choose(options)

    def prefer(self, options: Sequence[T], preference: float = PREFERENCE) -> T:
        chosen = super().prefer(options, preference)
        place, count = next(at for at, one in enumerate(options) if one is chosen), len(options)
        self.bits -= math.log2(((place + 1) / count) ** (1 / preference) - (place / count) ** (1 / preference))
        return chosen

    def chance(self, probability: float) -> bool:
        happens = super().chance(probability)
        self.bits -= math.log2((probability if happens else 1 - probability) or 1)
        return happens

    def number(self, low: int, high: int) -> int:
        self.bits += math.log2(high - low + 1)
        return super().number(low, high)


@cache
def story_bits(language: str, count: int = 1000) -> tuple[float, float]:
    """Bits of choices and bytes of text, means of stories as ``generate_story`` writes them."""
    grammar, bits, size = get_language(language), 0.0, 0
    for number in range(count):
        for attempt in itertools.count():
            teller = CountingTeller(grammar, f"7/{language}/{number}/{attempt}")
            cast(teller)
            teller.prefer(grammar.plots, PLOT_PREFERENCE)(teller)
            if grammar.length[0] <= grammar.measure(teller.text()) <= grammar.length[1]:
                break
        bits, size = bits + teller.bits, size + len(teller.text().encode())
    return bits / count, size / count


def loss_records(language: str) -> Iterator[tuple[str, list[Curve], list[str]]]:
    """Name, curves, and what the health checks find, in lines."""
    wanted = {"good": ("stories-1", "initial loss"), "lr": ("lr-2", "divergence"),
              "shuffled": ("shuffled-1", "divergence"), "garbage": ("garbage-1", "spike"),
              "repeated": ("repeated-5", "sudden drop"), "dead": ("dead-1", "dead source")}  # fmt: skip
    files = (RECORDS / "healthy.jsonl.gz", RECORDS / "faulty.jsonl.gz", GARBAGE)
    runs = {run["run"]: run for path in files for run in map(json.loads, gzip.open(path, "rt", encoding="utf-8"))}
    for name, (run, rule) in wanted.items():
        yield name, _curves(runs[run]["lines"]), _finding(runs[run], rule, language)


def _curves(lines: Sequence[dict[str, Any]], steps: int = 125) -> list[Curve]:
    names = {"loss": 8, "loss/en": 0, "loss/zh": 1}
    return [
        Curve(name, [(one["step"], one[name]) for one in lines if name in one and one["step"] < steps], colour=paint)
        for name, paint in names.items()
    ]


def _finding(run: dict[str, Any], rule: str, language: str, width: int = 46) -> list[str]:
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        (directory / "recipe.yaml").write_text(yaml.safe_dump(run["recipe"]))
        (directory / "identity.json").write_text(json.dumps({"model": {"vocab_size": run["vocab_size"]}}))
        late = time.time() - run["lines"][-1]["time"]
        lines = [json.dumps({**line, "time": late + line["time"]}) + "\n" for line in run["lines"]]
        (directory / "record.jsonl").write_text("".join(lines), encoding="utf-8")
        view = RunView(LocalRunLocation(directory))
        view.refresh()
        worst = next(one for one in check_health(view, directory) if one.what == rule)
    if language == "zh":
        text, width = f"{worst.level} {worst.what}：{worst.chinese}", 23
        return [text[at : at + width] for at in range(0, len(text), width)][:4]
    rows = [f"{worst.level.upper() if worst.level == 'bad' else worst.level} {worst.what}:"]
    for word in worst.text.split():
        rows = [*rows, word] if len(rows[-1]) + len(word) > width else [*rows[:-1], f"{rows[-1]} {word}"]
    return rows[:4]
