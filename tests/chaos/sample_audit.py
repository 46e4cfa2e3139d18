"""Which samples the surviving history of a run has seen: each exactly once, or the suite reports it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from zero2all.base.records import parse_record
from zero2all.train.data_loader import read_batch
from zero2all.train.plan import Plan

Line = TypeVar("Line")


@dataclass(frozen=True)
class SampleAudit:
    samples_lost: int
    samples_repeated: int
    steps_repeated: int
    """Steps that were started more than once."""


@dataclass(frozen=True)
class SeenSamples:
    """The samples of one step on one rank: a line of ``seen-*.jsonl``."""

    time: float
    """Of the monotonic clock, which all nodes of the suite share: a fault may shift the wall clock."""
    start: str
    """The start of the job that the rank belonged to."""
    rank: int
    step: int
    rows: list[str]
    """A hash of each sample."""


def audit_samples(directory: Path, plan: Plan, skipped: frozenset[int] = frozenset()) -> SampleAudit:
    """Compare the samples that the ranks logged with the plan. Of several starts that ran a step, the last counts."""
    seen: dict[int, dict[str, dict[int, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    latest: dict[tuple[int, str], float] = defaultdict(float)
    started = 0
    for line in read_seen_samples(directory):
        seen[line.step][line.start][line.rank] = line.rows
        latest[line.step, line.start] = max(latest[line.step, line.start], line.time)
        started += line.rank == 0
    lost = repeated = 0
    for step in set(range(plan.total_steps)) - skipped:
        expected = Counter(sample_hash(row) for row in read_batch(plan, step).inputs)
        starts = seen.get(step, {})
        last = max(starts, key=lambda start: latest[step, start], default=None)
        actual = Counter(row for rows in starts[last].values() for row in rows) if last is not None else Counter()
        lost += (expected - actual).total()
        repeated += (actual - expected).total()
    return SampleAudit(lost, repeated, steps_repeated=started - len(seen))


def read_seen_samples(directory: Path) -> list[SeenSamples]:
    return sorted(read_rank_lines(SeenSamples, directory, "seen-*.jsonl"), key=lambda line: line.time)


def read_rank_lines(record: type[Line], directory: Path, pattern: str) -> list[Line]:
    """Of the files that ranks append to."""
    lines = []
    for path in directory.glob(pattern):
        for raw in path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(raw)
            except ValueError:
                continue  # torn by a kill
            lines.append(parse_record(record, values, path))
    return lines


def sample_hash(sample: Tensor) -> str:
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]
