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
from typing import Any

from zero2all.errors import Z2aError
from zero2all.io import HISTORY_FILE, read_json

MAX_HISTORIES = 256  # in a lineage; a restart needs no older ones


@dataclass(frozen=True)
class Branch:
    history: str
    first_step: int
    """The step at which it branched off from the previous history."""


Lineage = tuple[Branch, ...]
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


def lineage_to_json(lineage: Lineage) -> list[list[Any]]:
    return [[branch.history, branch.first_step] for branch in lineage]


def lineage_from_json(value: Any) -> Lineage:
    match value:
        case [_, *_] if all(isinstance(entry, list) and len(entry) == 2 for entry in value):
            if all(isinstance(history, str) and isinstance(first_step, int) for history, first_step in value):
                return tuple(Branch(history, first_step) for history, first_step in value)
    raise Z2aError(f"not a lineage: {str(value)[:80]}") from ValueError(value)


def read_lineage(run: Path) -> Lineage | None:
    """The lineage of the last start or rollback of a run; None if it has none."""
    path = run / HISTORY_FILE
    return lineage_from_json(read_json(path).get("lineage")) if path.exists() else None
