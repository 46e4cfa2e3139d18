"""How much all files of a source together may unpack to.

One file is limited by what it is on disk, but only from some size on: ten thousand small bombs, each below it, would
fill a disk. A part stops by itself, at a point that depends on its own files only. The parts of a source are added up
as they end, and once they are over the budget, no further part of it is read. Which parts come before that depends on
the order in which workers end, so a source within its budget, as any honest one is, gives the same documents always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zero2all.console import warn
from zero2all.corpus.part_files import PartRecord, PartTask, budget_marker
from zero2all.io import write_text
from zero2all.recipe import CorpusRecipe
from zero2all.units import show_bytes

UNCHECKED_BYTES = 64 * 2**30  # of records of a source before the ratio is checked


class ExpansionBudget:
    """Adds up what the parts of each source unpack to, and tells the workers where a source is over its budget."""

    def __init__(self, recipe: CorpusRecipe, tasks: Sequence[PartTask], directory: Path) -> None:
        self._directory, self._ratio = directory, recipe.max_compression_ratio
        stored: Counter[str] = Counter()
        for task in tasks:
            stored[task.source.name] += task.bytes
        self._allowed = {name: max(UNCHECKED_BYTES, self._ratio * size) for name, size in stored.items()}
        self._unpacked: Counter[str] = Counter()
        for name in stored:  # of a build that was stopped; the budget may be another one now
            budget_marker(directory, name).unlink(missing_ok=True)

    def count(self, part: PartRecord) -> None:
        before, allowed = self._unpacked[part.source], self._allowed[part.source]
        self._unpacked[part.source] += part.unpacked
        if before <= allowed < self._unpacked[part.source]:
            write_text(budget_marker(self._directory, part.source), "")
            warn(
                f"corpus source {part.source!r} unpacks to more than {show_bytes(int(allowed))}, {self._ratio:g} times "
                "its size; the rest of it is not read. If you trust the data, raise corpus.max_compression_ratio"
            )
