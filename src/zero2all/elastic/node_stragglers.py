"""Nodes that are slow: all others wait for them in every collective.

Once a minute, all at the same time by the clock of the rendezvous, the agents report when the last rank of their node
entered each of its recent collectives. Only collectives that all nodes take part in are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zero2all.elastic.stragglers import CHECK_INTERVAL, find_straggler

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
    """Of the time that the others waited for it."""
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
        """From the arrival times of the ranks of this node, by its own clock."""
        last: dict[str, float] = {}
        for arrivals in by_rank.values():
            for key, when in arrivals.items():
                name = "|".join(map(str, key))
                last[name] = max(self.at(when), last.get(name, 0.0))
        newest = sorted(last.items(), key=lambda item: item[1])[-MAX_REPORTED:]
        return ArrivalReport(int(self.at(time.time()) // CHECK_INTERVAL), dict(newest))
