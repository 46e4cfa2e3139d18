"""What pictures of docs/explain measure: stories, their entropy, and records of small training runs."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.cells import cell_len

from zero2all.base.charts.plot import Curve
from zero2all.storyworld import generate_stories
from zero2all.storyworld.generate import get_language
from zero2all.storyworld.plots import cast
from zero2all.storyworld.teller import PLOT_PREFERENCE, PREFERENCE, Teller
from zero2all.track.health_checks import check_health
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

RECORDS = Path(__file__).parents[2] / "tests" / "track" / "records"
MAX_ROWS = 5  # of a finding
GARBAGE = Path(__file__).with_name("garbage.jsonl.gz")
T = TypeVar("T")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\W", text)


def _bytes(text: str) -> list[str]:
    return [chr(byte) for byte in text.encode()]


UNITS: dict[str, dict[str, Callable[[str], list[str]]]] = {
    "en": {"bytes": _bytes, "words": _words},
    "zh": {"bytes": _bytes, "characters": list},
}


@cache
def unigram_by_unit(language: str, stories: int = 600) -> list[tuple[str, int, float, float]]:
    """Kind of token, size of the vocabulary; nats per token and bits per byte of new stories, by frequencies alone."""
    texts = list(generate_stories(language, 7, stories))
    seen, new = texts[: -stories // 6], texts[-stories // 6 :]
    found = []
    for name, split in UNITS[language].items():
        counts = Counter(token for text in seen for token in split(text))
        tokens = [token for text in new for token in split(text)]
        total = counts.total() + len(counts)
        nats = -sum(math.log((counts[token] + 1) / total) for token in tokens)
        bits = nats / math.log(2) / sum(len(text.encode()) for text in new)
        found.append((name, len(counts), nats / len(tokens), bits))
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
    lines = [line for path in files for line in gzip.decompress(path.read_bytes()).splitlines()]
    runs = {run["run"]: run for run in map(json.loads, lines)}
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
    text = f"{worst.level} {worst.what}: {worst.chinese if language == 'zh' else worst.text}"
    rows = [""]
    for piece in re.findall(r"[!-~]+[：，；。？） ]*|.[：，；。？）]*", text):  # a word, or one Chinese character
        rows = [*rows, piece] if cell_len(rows[-1] + piece.rstrip()) > width else [*rows[:-1], rows[-1] + piece]
    return rows[:MAX_ROWS]
