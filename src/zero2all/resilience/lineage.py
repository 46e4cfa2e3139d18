"""Which history a state belongs to. Step numbers alone do not tell: steps that were lost are done again, differently.

Every start of a run, and every rollback, begins a history with a random id. A lineage lists the histories that a state
went through, oldest first, each with the step at which it took over: ``((a1, 0), (b2, 900))`` says that history b2
began from the state of step 900 of history a1. What a1 did after step 900 is not part of it: it was abandoned.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.errors import Z2aError
from zero2all.io import read_json

HISTORY = "history.json"
LONGEST = 256  # histories in a lineage; only those that kept a state count, and older ones are of no use to a restart


@dataclass(frozen=True)
class Branch:
    history: str
    first: int
    """The step at which it took over from the history before."""


Lineage = tuple[Branch, ...]
UNKNOWN: Lineage = (Branch("unknown", 0),)
"""Of durable checkpoints from before histories were kept."""


def new_history() -> str:
    return secrets.token_hex(6)


def descend(lineage: Lineage, step: int, history: str) -> Lineage:
    """The lineage of a new history that begins from the state of ``step`` at the end of ``lineage``."""
    return (*lineage, Branch(history, step))[-LONGEST:]


def passes_through(lineage: Lineage, step: int, history: str) -> bool:
    """Whether ``lineage`` contains the state of ``step`` of ``history``, or would once it gets there."""
    for number, branch in enumerate(lineage):
        if branch.history == history:
            until = lineage[number + 1].first if number + 1 < len(lineage) else math.inf
            return branch.first <= step <= until
    return False


def is_later(lineage: Lineage, than: Lineage) -> bool:
    """Whether ``lineage`` branched off from the last history of ``than``."""
    return any(branch.history == than[-1].history for branch in lineage[:-1])


def to_json(lineage: Lineage) -> list[list[Any]]:
    return [[branch.history, branch.first] for branch in lineage]


def from_json(value: Any) -> Lineage:
    match value:
        case [_, *_] if all(isinstance(entry, list) and len(entry) == 2 for entry in value):
            if all(isinstance(history, str) and isinstance(first, int) for history, first in value):
                return tuple(Branch(history, first) for history, first in value)
    raise Z2aError(f"not a lineage: {str(value)[:80]}") from ValueError(value)


def read_line(run: Path) -> Lineage | None:
    """The lineage of the last start or rollback of a run; None if it has none."""
    path = run / HISTORY
    return from_json(read_json(path).get("lineage")) if path.exists() else None
