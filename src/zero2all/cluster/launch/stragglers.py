"""Stragglers: a slow rank or node delays all others in every collective. Torch's flight recorder shows which.

It records when each rank enters each collective. On GPUs that is when the host launches it, so a slow host shows here,
and a slow card in ``z2a doctor``.

Nodes are compared once a minute, all at the same time by the clock of the rendezvous: the agents report when the last
rank of their node entered each of its recent collectives. Only collectives that all nodes take part in count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.base.processes import read_text
from zero2all.cluster.launch.flight_recorder import read_collectives, read_groups
from zero2all.cluster.launch.worker import collectives_path

CHECK_INTERVAL = 60.0  # seconds between two checks
STRAGGLER_THRESHOLD = 0.1  # share of the time that the others wait for a rank
MIN_COLLECTIVES = 20  # with fewer it may be noise


def read_arrival_times(directory: Path, local_rank: int) -> dict[Any, float]:
    """When a rank entered each of its recent collectives, in seconds."""
    dump = read_text(collectives_path(directory, local_rank))
    groups = read_groups(dump)  # the groups of one mesh dimension may have one name
    return {
        (one.process_group[0], *groups.get(one.process_group[0], ()), one.profiling_name, one.number): (
            one.time_created_ns / 1e9
        )
        for one in read_collectives(dump)
    }


def wait_share_by_rank(arrivals: dict[int, dict[Any, float]]) -> dict[int, float]:
    """The share of the time that the others waited for each rank alone."""
    known = list(arrivals.values())
    common = set.intersection(*map(set, known)) if len(known) > 1 else set()
    if len(common) < MIN_COLLECTIVES:
        return {}
    times = [when for times_by_key in known for key, when in times_by_key.items() if key in common]
    waited = dict.fromkeys(arrivals, 0.0)
    for key in common:
        ordered = sorted((times_by_key[key], rank) for rank, times_by_key in arrivals.items())
        waited[ordered[-1][1]] += ordered[-1][0] - ordered[-2][0]
    return {rank: seconds / (max(times) - min(times)) for rank, seconds in waited.items()}


def find_straggler(arrivals: dict[int, dict[Any, float]]) -> tuple[int, float] | None:
    """The one rank that delays the others, and its share of the time; None if none or several do."""
    slow = {rank: share for rank, share in wait_share_by_rank(arrivals).items() if share > STRAGGLER_THRESHOLD}
    return next(iter(slow.items())) if len(slow) == 1 else None


CHECKS_TO_CONFIRM = 5  # in a row in which a node is slow before it is a straggler
MAX_REPORTED = 128  # collectives of one node in one check
CLOCK_SAMPLES = 5  # the quickest answer has the smallest error


@dataclass(frozen=True)
class ArrivalReport:
    check: int
    """The minutes of the rendezvous's clock: the same on all nodes."""
    arrivals: dict[str, float]
    """When the node's last rank entered each collective, by that clock."""


@dataclass(frozen=True)
class StragglerFinding:
    """``confirmed``: slow in several checks in a row."""

    node: str
    share: float
    """The share of the time that the others waited for it."""
    confirmed: bool


class StragglerWatch:
    """The checks of one round, at the rendezvous."""

    def __init__(self) -> None:
        self._check, self._reports = -1, dict[str, dict[str, float]]()
        self._slow, self._in_a_row = "", 0

    def report(self, node: str, report: ArrivalReport, members: set[str]) -> StragglerFinding | None:
        """The slow node, once all members have reported a check."""
        if report.check != self._check:
            self._check, self._reports = report.check, {}
        self._reports[node] = report.arrivals
        if not members <= self._reports.keys():
            return None
        ids = sorted(members)
        found = find_straggler({number: self._reports[id] for number, id in enumerate(ids)})
        self._reports = {}
        if found is None:
            self._slow, self._in_a_row = "", 0
            return None
        slow = ids[found[0]]
        self._in_a_row = self._in_a_row + 1 if slow == self._slow else 1
        self._slow = slow
        return StragglerFinding(slow, found[1], self._in_a_row >= CHECKS_TO_CONFIRM)


class SharedClock:
    """The clock of the rendezvous, as seen from a node."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read, self._offset = read, 0.0

    def synchronize(self) -> None:
        samples = []
        for _ in range(CLOCK_SAMPLES):
            before = time.time()
            there = self._read()
            after = time.time()
            samples.append((after - before, there - (before + after) / 2))
        self._offset = min(samples)[1]

    def at(self, here: float) -> float:
        return here + self._offset

    def seconds_to_next_check(self) -> float:
        return CHECK_INTERVAL - self.at(time.time()) % CHECK_INTERVAL

    def arrival_report(self, by_rank: Mapping[int, Mapping[Any, float]]) -> ArrivalReport:
        """The report by the arrival times of the ranks of this node, which are of its own clock."""
        last: dict[str, float] = {}
        for arrivals in by_rank.values():
            for key, when in arrivals.items():
                name = "|".join(map(str, key))
                last[name] = max(self.at(when), last.get(name, 0.0))
        newest = sorted(last.items(), key=lambda item: item[1])[-MAX_REPORTED:]
        return ArrivalReport(int(self.at(time.time()) // CHECK_INTERVAL), dict(newest))
