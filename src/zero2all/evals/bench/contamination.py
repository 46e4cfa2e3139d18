"""Contamination: which items of a benchmark are in the documents that a run was trained on.

An item is found by the n-grams of the decontamination index: 13 words, or 20 characters of Chinese. It is clean if no
training document has any of them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.console import progress
from zero2all.corpus.dedup.decontaminate import build_decontamination_index, find_ngrams
from zero2all.engine import Engine, available_cores
from zero2all.evals.bench.items import AnswerItem, ChoiceItem, ClozeItem, Item
from zero2all.evals.bench.tasks import Task
from zero2all.io import read_documents_manifest

CLEAN = "clean"  # the version of a task with the items that are in no training document


@dataclass(frozen=True)
class Contamination:
    """How much of a task is in the training documents."""

    task: str
    shares: dict[str, float]
    """By item: how many of its n-grams are in training documents. Items too short for an n-gram are not here."""
    items: int

    @property
    def found(self) -> int:
        """Number of items with an n-gram in a training document."""
        return sum(share > 0 for share in self.shares.values())

    @property
    def too_short(self) -> int:
        return self.items - len(self.shares)

    def is_clean(self, item_id: str) -> bool:
        """Whether nothing of an item was found; also if it is too short to tell."""
        return self.shares.get(item_id, 0.0) == 0

    def __str__(self) -> str:
        short = f"; {self.too_short} are too short to tell" if self.too_short else ""
        return f"{self.task}: {self.found} of {self.items} items have text in the training documents{short}"


def find_contamination_of(tasks: list[Task], documents: Path) -> list[Contamination]:
    """Compare every item with every training document of a corpus."""
    corpus = read_documents_manifest(documents)
    shards = [documents / "train" / shard for part in corpus.splits["train"].values() for shard in part.shards]
    names = {f"{number}/{item.id}": (number, item) for number, task in enumerate(tasks) for item in task.items}
    with tempfile.TemporaryDirectory() as folder:
        texts = {name: _item_texts(item) for name, (_, item) in names.items()}
        index = build_decontamination_index(texts, Path(folder))
        found = np.zeros(len(index.ngrams), dtype=bool)
        engine = Engine(workers=min(available_cores(), max(1, len(shards))))
        with progress("comparing items with training documents", len(shards)) as advance:
            arguments = [(shard, Path(folder)) for shard in shards]
            for places in engine.run(find_ngrams, arguments, lambda number: advance(1)):
                found[places] = True
    totals = np.bincount(index.owners, minlength=len(index.names))
    hits = np.bincount(index.owners, weights=found, minlength=len(index.names))
    shares: list[dict[str, float]] = [{} for _ in tasks]
    for name, total, hit in zip(index.names, totals, hits, strict=True):
        number, item = names[name]
        if total:
            shares[number][item.id] = float(hit / total)
    return [Contamination(task.name, own, len(task.items)) for task, own in zip(tasks, shares, strict=True)]


def _item_texts(item: Item) -> list[str]:
    """The texts of an item, each by itself: what is between them is ours."""
    if isinstance(item, ChoiceItem):
        return [item.passage, item.question, *item.options]
    if isinstance(item, ClozeItem):
        return [item.context + item.continuation]
    if isinstance(item, AnswerItem):
        return [item.question, item.solution]
    return [item.prompt, item.solution]
