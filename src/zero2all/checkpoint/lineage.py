"""Which history a state belongs to. Step numbers alone do not identify it: lost steps are repeated, with other results.

Every start of a run, and every rollback, begins a history with a random id. A lineage lists the histories that a state
went through, oldest first, each with the step at which it began: ``((a1, 0), (b2, 900))`` means that history b2
began from the state of step 900 of history a1. What a1 did after step 900 is not part of it: it was abandoned.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from zero2all.io import HISTORY_FILE, read_record
from zero2all.records import RestoreSummary

MAX_HISTORIES = 256  # in a lineage; a restart needs no older ones


class Branch(NamedTuple):
    history: str
    first_step: int
    """The step at which it branched off from the previous history."""


Lineage = tuple[Branch, ...]
SavedLineage = Annotated[Lineage, Field(min_length=1)]
UNKNOWN_LINEAGE: Lineage = (Branch("unknown", 0),)
"""Lineage of durable checkpoints written before histories were recorded."""


def new_history_id() -> str:
    return secrets.token_hex(6)


def extend_lineage(lineage: Lineage, step: int, history: str) -> Lineage:
    """The lineage of a new history that begins from the state of ``step`` at the end of ``lineage``."""
    return (*lineage, Branch(history, step))[-MAX_HISTORIES:]


def contains_state(lineage: Lineage, step: int, history: str) -> bool:
    """Whether ``lineage`` contains the state of ``step`` of ``history``, or will once it reaches that step."""
    for number, branch in enumerate(lineage):
        if branch.history == history:
            until = lineage[number + 1].first_step if number + 1 < len(lineage) else math.inf
            return branch.first_step <= step <= until
    return False


def descends_from(lineage: Lineage, ancestor: Lineage) -> bool:
    """Whether ``lineage`` branched off from the last history of ``ancestor``."""
    return any(branch.history == ancestor[-1].history for branch in lineage[:-1])


@dataclass(frozen=True)
class HistoryRecord:
    """``history.json``."""

    lineage: SavedLineage
    time: float = 0.0
    """When its last history began."""
    restored: RestoreSummary | None = None


def read_lineage(run: Path) -> Lineage | None:
    """The lineage of the last start or rollback of a run; None if it has none."""
    path = run / HISTORY_FILE
    return read_record(HistoryRecord, path).lineage if path.exists() else None
