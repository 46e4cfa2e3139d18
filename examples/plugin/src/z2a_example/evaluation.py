"""A benchmark and a sink."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from zero2all.base.plugins import register
from zero2all.evals.bench.items import ChoiceItem, Item


@register("task", "sums", language="en", form="cloze")
def sums(data: Path, *, largest: int = 4) -> tuple[list[Item], list[Item]]:
    """Ask sums of small numbers. It needs no files."""
    numbers, options = range(1, largest), tuple(map(str, range(2 * largest)))
    return [ChoiceItem(f"{a}+{b}", f"{a}+{b}=", options, (a + b,)) for a in numbers for b in numbers], []


@register("sink", "csv")
class CsvSink:
    """Write every metric as a line of metrics.csv."""

    def __init__(self, directory: Path, *, digits: int = 4) -> None:
        self.stream = open(directory / "metrics.csv", "a", newline="", encoding="utf-8")
        self.writer, self.digits = csv.writer(self.stream), digits

    def step(self, step: int, values: dict[str, float]) -> None:
        self.writer.writerows((step, name, round(value, self.digits)) for name, value in values.items())

    def event(self, name: str, details: dict[str, Any]) -> None: ...

    def sample(self, step: int, name: str, text: str) -> None: ...

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None: ...

    def close(self) -> None:
        self.stream.close()
