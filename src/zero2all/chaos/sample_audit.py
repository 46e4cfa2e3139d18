"""Which samples the surviving history of a run has seen: each exactly once, or the suite reports it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zero2all.train.data_loader import read_batch
from zero2all.train.plan import Plan


@dataclass(frozen=True)
class SampleAudit:
    samples_lost: int
    samples_repeated: int
    steps_repeated: int
    """Steps that were started more than once."""


def audit_samples(directory: Path, plan: Plan, skipped: frozenset[int] = frozenset()) -> SampleAudit:
    """Compare the samples that the ranks logged with the plan. Of several starts that ran a step, the last counts."""
    seen: dict[int, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    latest: dict[tuple[int, str], float] = defaultdict(float)
    started = 0
    for line in read_seen_samples(directory):
        step, start, rank = line["step"], line["start"], line["rank"]
        seen[step][start][rank] = line["rows"]
        latest[step, start] = max(latest[step, start], line["time"])
        started += rank == 0
    lost = repeated = 0
    for step in set(range(plan.total_steps)) - skipped:
        expected = Counter(sample_hash(row) for row in read_batch(plan, step).inputs)
        starts = seen.get(step, {})
        last = max(starts, key=lambda start: latest[step, start], default=None)
        actual = Counter(row for rows in starts[last].values() for row in rows) if last is not None else Counter()
        lost += (expected - actual).total()
        repeated += (actual - expected).total()
    return SampleAudit(lost, repeated, steps_repeated=started - len(seen))


def read_seen_samples(directory: Path) -> list[dict[str, Any]]:
    lines = []
    for path in directory.glob("seen-*.jsonl"):
        for raw in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(raw))
            except ValueError:
                continue  # torn by a kill
    return sorted(lines, key=lambda line: line["time"])


def sample_hash(sample: Tensor) -> str:
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]
