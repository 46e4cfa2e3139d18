"""Which rank delays the others."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.launch.test_rendezvous_state import Cluster
from zero2all.cluster.launch.restart_policy import StragglerPolicy
from zero2all.cluster.launch.stragglers import (
    CHECKS_TO_CONFIRM,
    ArrivalReport,
    SharedClock,
    StragglerFinding,
    StragglerWatch,
    find_straggler,
    wait_share_by_rank,
)


def arrivals(late: dict[int, float], count: int = 100) -> dict[int, dict[Any, float]]:
    """Four ranks enter a collective every 0.1 s, some of them late."""
    return {rank: {(0, "all_reduce", n): n * 0.1 + late.get(rank, 0.0) for n in range(count)} for rank in range(4)}


def test_the_rank_that_arrives_last_by_far_is_named() -> None:
    straggler = find_straggler(arrivals({2: 0.03}))
    assert straggler[0] == 2
    assert 0.25 < straggler[1] < 0.35


def test_ranks_that_arrive_together_are_not() -> None:
    assert find_straggler(arrivals({1: 0.001, 3: 0.002})) is None
    assert find_straggler(arrivals({2: 0.05}, count=5)) is None, "too few to say"


def test_only_collectives_of_all_ranks_count() -> None:
    ragged = arrivals({})
    ragged[0] = {key: when for key, when in ragged[0].items() if key[2] >= 50}
    assert set(wait_share_by_rank(ragged)) == {0, 1, 2, 3}
    assert wait_share_by_rank({0: ragged[0]}) == {}


def node_arrivals(check: int, lateness: float, step: float = 1.0) -> ArrivalReport:
    return ArrivalReport(check, {f"pg|all_reduce|{number}": number * step + lateness for number in range(30)})


def test_a_node_is_confirmed_after_several_checks_in_a_row() -> None:
    watch, members = StragglerWatch(), {"a", "b", "c"}

    def check(number: int, slow: str | None) -> StragglerFinding | None:
        found = None
        for name in sorted(members):
            found = watch.report(name, node_arrivals(number, 0.3 if name == slow else 0.0), members)
            assert name == "c" or found is None, "not all have reported"
        return found

    assert check(0, None) is None
    findings = [check(number, "b") for number in range(1, CHECKS_TO_CONFIRM)]
    assert [(found.node, found.confirmed) for found in findings if found is not None] == [("b", False)] * 4
    assert check(10, None) is None
    anew = check(11, "b")
    assert (anew.node, anew.confirmed, round(anew.share, 1)) == ("b", False, 0.3)
    for number in range(12, 12 + CHECKS_TO_CONFIRM - 2):
        check(number, "b")
    last = check(20, "b")
    assert last.confirmed


@pytest.mark.parametrize("policy", ["warn", "exclude"])
def test_a_straggler_is_excluded_only_on_request(policy: StragglerPolicy) -> None:
    cluster = Cluster(2, 3)
    cluster.state.membership.settings = replace(cluster.state.membership.settings, stragglers=policy)
    cluster.join("1", "2", "3")
    warnings = [
        cluster.state.exclusions.report_arrivals(name, node_arrivals(check, 0.3 if name == "2" else 0.0))
        for check in range(CHECKS_TO_CONFIRM)
        for name in ("1", "2", "3")
    ]
    assert [bool(warning) for warning in warnings] == [False, False, True] * CHECKS_TO_CONFIRM
    assert "2 (10.0.0.2) is slow: the others wait for it 31% of the time" in str(warnings[-1])
    assert [entry.name for entry in cluster.state.status().excluded] == (["2"] if policy == "exclude" else [])
    assert cluster.state.status().change == (policy == "exclude"), "its ranks save first"


def test_the_clock_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour ahead, and answers take 10 to 50 ms: arrivals are right within half of the quickest one."""
    here = iter([100.0 + 0.01 * number for number in range(20)])
    monkeypatch.setattr(time, "time", lambda: next(here))
    answers = iter([3700.005, 3700.025, 3700.04, 3700.07, 3700.09])
    clock = SharedClock(lambda: next(answers))
    clock.synchronize()
    assert clock.at(0.0) == pytest.approx(3600.0, abs=0.006)
    report = clock.arrival_report({0: {("pg", "all_reduce", 1): 50.0}, 1: {("pg", "all_reduce", 1): 51.0}})
    assert report.arrivals == {"pg|all_reduce|1": pytest.approx(3651.0, abs=0.006)}, "the last rank counts"
    assert 0 < clock.seconds_to_next_check() <= 60
