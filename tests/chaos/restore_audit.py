"""Which start wrote the state that each rank restored: finds a mixture of two histories even if its losses are right.

Every start of the suite's job is deterministic, so states of two histories hold the same weights, and a restart that
mixes them would not show in the losses. The suite therefore marks them: each time a state is loaded, a rank seeds
torch's random generator, which the job does not use otherwise, with a number of its own. The generator is part of
every checkpoint, so the next start reads in it who wrote what it has restored.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.chaos.sample_audit import read_rank_lines


@dataclass(frozen=True)
class RestoreMark:
    """What one rank found when it loaded a state, or started from scratch: a line of ``restored-*.jsonl``."""

    time: float
    """Of the monotonic clock, which all nodes of the suite share."""
    segment: str
    """The steps from one load to the next, the same on all ranks."""
    rank: int
    step: int
    """The first step."""
    seed: int
    """The seed in the state that was loaded."""


class RestoreMarker:
    """Marks the states of one rank.

    >>> marker.on_restore()   # a state is about to be loaded
    >>> marker.on_batch(12)   # the first batch after it
    """

    def __init__(self, start: str, rank: int, directory: Path) -> None:
        self._start, self._rank, self._directory = start, rank, directory
        self._loads, self._is_marked = 0, False

    def on_restore(self) -> None:
        self._loads, self._is_marked = self._loads + 1, False

    def on_batch(self, step: int) -> None:
        if self._is_marked:
            return
        self._is_marked = True
        segment = f"{self._start}/{self._loads}"
        mark = RestoreMark(time.monotonic(), segment, self._rank, step, torch.initial_seed())
        path = self._directory / f"restored-{self._start}-{self._rank}-{os.getpid()}.jsonl"
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(mark)) + "\n")
        torch.manual_seed(segment_seed(segment))


def segment_seed(segment: str) -> int:
    return int.from_bytes(hashlib.sha256(segment.encode()).digest()[:6])


def read_restore_marks(directory: Path) -> list[RestoreMark]:
    return sorted(read_rank_lines(RestoreMark, directory, "restored-*.jsonl"), key=lambda mark: mark.time)


def find_wrong_restores(marks: list[RestoreMark]) -> list[str]:
    """Restores that mixed states of several segments, or took one that the job had abandoned."""
    by_segment: dict[str, list[RestoreMark]] = defaultdict(list)
    for mark in marks:
        by_segment[mark.segment].append(mark)
    names = {segment_seed(segment): segment for segment in by_segment}
    problems: list[str] = []
    lineage: list[tuple[str, int]] = []  # segments of the surviving history, each with its first step
    for segment, own in by_segment.items():
        step = own[0].step
        # A rank beyond the saved number of ranks finds no generator in the state and keeps its own.
        origins = {names[mark.seed] for mark in own if mark.seed in names}
        if len(origins) > 1:
            problems.append(f"the ranks restored step {step} from states of {len(origins)} different starts")
        elif not origins:
            if step > 0:
                problems.append(f"no rank knows who wrote the state of step {step}")
            lineage = []
        else:
            kept = _lineage_of_state(lineage, origins.pop(), step)
            if kept is None:
                problems.append(f"the state of step {step} that was restored is of an abandoned history")
            lineage = kept or []
        lineage.append((segment, step))
    return problems


def _lineage_of_state(lineage: list[tuple[str, int]], origin: str, step: int) -> list[tuple[str, int]] | None:
    """The lineage up to a state; None if it is not on it."""
    for number, (segment, _) in enumerate(lineage):
        if segment == origin:
            replaced_at = lineage[number + 1][1] if number + 1 < len(lineage) else step
            return lineage[: number + 1] if step <= replaced_at else None
    return None
