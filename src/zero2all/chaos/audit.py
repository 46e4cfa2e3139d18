"""Which samples the surviving history of a run has seen: each once, or the suite says so."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zero2all.train.batches import read_batch
from zero2all.train.plan import Plan


@dataclass(frozen=True)
class Audit:
    lost: int
    repeated: int
    steps_again: int
    """Steps that were begun more than once."""


def audit(directory: Path, plan: Plan, skipped: frozenset[int] = frozenset()) -> Audit:
    """Hold what the ranks wrote down against the plan. Of several starts that did a step, the last one counts."""
    seen: dict[int, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    latest: dict[tuple[int, str], float] = defaultdict(float)
    begun = 0
    for line in seen_lines(directory):
        step, start, rank = line["step"], line["start"], line["rank"]
        seen[step][start][rank] = line["rows"]
        latest[step, start] = max(latest[step, start], line["time"])
        begun += rank == 0
    lost = repeated = 0
    for step in set(range(plan.total)) - skipped:
        expected = Counter(row_name(row) for row in read_batch(plan, step).inputs)
        starts = seen.get(step, {})
        last = max(starts, key=lambda start: latest[step, start], default=None)
        found = Counter(row for rows in starts[last].values() for row in rows) if last is not None else Counter()
        lost += (expected - found).total()
        repeated += (found - expected).total()
    return Audit(lost, repeated, steps_again=begun - len(seen))


def seen_lines(directory: Path) -> list[dict[str, Any]]:
    lines = []
    for path in directory.glob("seen-*.jsonl"):
        for raw in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(raw))
            except ValueError:
                continue  # torn by a kill
    return sorted(lines, key=lambda line: line["time"])


def row_name(row: Tensor) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]
