"""The node test after a failure: which node is found to be bad, and what a broken test process leads to."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.launch.test_node_exclusion import CRASH, CUT_OFF, excluded, names
from tests.cluster.launch.test_rendezvous_state import Cluster
from zero2all.cluster.doctor.pairs import DeviceCheck
from zero2all.cluster.launch import pair_check
from zero2all.cluster.launch.pair_check import (
    DEVICE_TIMEOUT,
    DEVICE_TURN,
    REPORT_MARGIN,
    NextTurn,
    PairTest,
    TurnReport,
    run_pair_check,
)
from zero2all.cluster.launch.restart_policy import FailureFacts

GOOD = DeviceCheck("card", 0.01, "abc", steady=True)
HANG = FailureFacts(step=7, kind="hang")


def run_test(
    test: PairTest,
    seconds: Callable[[int, int], float | None],
    device: Callable[[int], DeviceCheck] = lambda number: GOOD,
    silent: int | None = None,
) -> int:
    """All nodes take their turns; returns how many exchanges each had at most."""
    now, turn, ids = 0.0, DEVICE_TURN, test.members
    while not test.done:
        for number, id in enumerate(ids):
            if number == silent:
                continue
            if turn == DEVICE_TURN:
                test.report(id, TurnReport(turn, [device(number)]))
                continue
            found = test.next_turn(id, turn - 1)
            took = None if found.pair is None else seconds(*found.pair)
            test.report(id, TurnReport(turn, seconds=took))
        test.advance(now)
        if silent is not None:
            now += DEVICE_TIMEOUT + REPORT_MARGIN
            test.advance(now)
        turn = test.turn
    return turn


@settings(max_examples=60, deadline=None)
@given(count=st.integers(3, 40), bad=st.integers(0, 39), fails=st.booleans())
def test_one_bad_node_among_any_number_is_found(count: int, bad: int, fails: bool) -> None:
    bad %= count
    test = PairTest(names(count), now=0.0)
    turns = run_test(test, lambda one, other: (None if fails else 4.0) if bad in (one, other) else 0.01)
    assert list(test.bad_members()) == [names(count)[bad]]
    assert turns <= 3, "two rounds of pairings, or three for three nodes"


@pytest.mark.parametrize("count", [2, 3, 16, 1001])
def test_good_nodes_are_all_good(count: int) -> None:
    rng = random.Random(count)
    test = PairTest(names(count), now=0.0)
    run_test(test, lambda one, other: rng.uniform(0.005, 0.03))
    assert test.bad_members() == {}


def test_two_nodes_cannot_tell_which_of_them_is_cut_off() -> None:
    test = PairTest(names(2), now=0.0)
    run_test(test, lambda one, other: None)
    assert test.bad_members() == {}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (DeviceCheck("card", 0.01, "abc", steady=False), "different bits each time"),
        (DeviceCheck("card", 0.01, "xyz", steady=True), "different bits than its peers"),
        (DeviceCheck("card", 0.5, "abc", steady=True), "50 times as slow"),
    ],
)
def test_a_bad_device(broken: DeviceCheck, reason: str) -> None:
    test = PairTest(names(4), now=0.0)
    run_test(test, lambda one, other: 0.01, lambda number: broken if number == 2 else GOOD)
    ((name, why),) = test.bad_members().items()
    assert (name, reason in why) == ("3", True)


def test_a_node_whose_test_never_ends_is_bad_and_a_slow_start_of_all_is_not() -> None:
    test = PairTest(names(5), now=0.0)
    run_test(test, lambda one, other: 0.01, silent=4)
    assert list(test.bad_members()) == ["5"]
    nobody = PairTest(names(5), now=0.0)
    assert nobody.advance(DEVICE_TIMEOUT + REPORT_MARGIN)
    assert nobody.done
    assert nobody.bad_members() == {}, "if all fail, the cause is not a node"


def start(*counts: int, nodes: int) -> Cluster:
    cluster = Cluster(*counts).join(*names(nodes))
    cluster.pass_time(11.0)
    return cluster


def restart(cluster: Cluster, facts: dict[str, FailureFacts]) -> bool:
    """All nodes report and return; whether the next round is tested."""
    for name in names(len(cluster.ranks())):
        cluster.state.exclusions.report_failure(name, facts.get(name, CUT_OFF))
    cluster.wait(*list(cluster.ranks()), failed=True)
    return {cluster.assignments[name].node_test for name in cluster.ranks()} == {True}


def test_which_failures_lead_to_a_test() -> None:
    cluster = start(2, 3, nodes=3)
    assert not cluster.assignments["1"].node_test, "not at the start"
    assert restart(cluster, {"2": CRASH}), "a signal"
    assert restart(start(3, nodes=3), dict.fromkeys(names(3), HANG))
    assert restart(start(3, nodes=3), {}), "all were cut off, and nobody knows by whom"
    assert not restart(start(3, nodes=3), {"2": FailureFacts(7, "crash")}), "an exception"
    assert not restart(start(3, nodes=3), {"2": FailureFacts(7, "out of memory")})
    assert not restart(start(3, nodes=3), {"2": FailureFacts(7, "stopped")})
    assert not restart(start(1, nodes=1), {"1": CRASH}), "one node has nobody to compare with"
    lost = start(2, 3, nodes=3)
    lost.state.leave("3", gracefully=False)
    lost.state.exclusions.report_failure("1", CUT_OFF)
    lost.wait("1", "2", failed=True)
    lost.pass_time(4.0)
    assert not lost.assignments["1"].node_test, "the cause is gone"


def test_a_bad_node_is_excluded_before_ranks_start() -> None:
    cluster = start(2, 3, nodes=3)
    restart(cluster, dict.fromkeys(names(3), HANG))
    for name in names(3):
        cluster.state.tests.report_turn(name, TurnReport(DEVICE_TURN, [GOOD]))
        cluster.pass_time(0.0)
    turn = 0
    while not (found := cluster.state.tests.next_turn("1", turn - 1) or NextTurn(-1)).done:
        for name in names(3):
            mine = cluster.state.tests.next_turn(name, turn - 1)
            took = None if mine.pair is None or 2 in mine.pair else 0.01
            cluster.state.tests.report_turn(name, TurnReport(turn, seconds=took))
        cluster.pass_time(0.0)
        turn += 1
    assert found.again
    assert "3 (10.0.0.3) fails the node test" in str(found.finding)
    assert excluded(cluster.state) == ["3"]
    cluster.wait("1", "2")
    cluster.state.join_next_round("3", 4003, cluster.now)
    cluster.pass_time(4.0)
    assert cluster.ranks() == {"1": 0, "2": 1}
    assert not cluster.assignments["1"].node_test, "once for each failure"


def test_a_loss_during_the_test_ends_it() -> None:
    cluster = start(2, 3, nodes=3)
    restart(cluster, dict.fromkeys(names(3), HANG))
    assert cluster.state.tests.next_turn("1", DEVICE_TURN) is None
    cluster.state.leave("3", gracefully=False)
    cluster.pass_time(0.0)
    answer = cluster.state.tests.next_turn("1", DEVICE_TURN)
    assert (answer.done, answer.again, answer.finding) == (True, True, None)


@pytest.mark.parametrize(
    "program",
    ["import sys; sys.exit(3)", "import time; time.sleep(60)", "print('nonsense', flush=True); input(); input()"],
)
def test_a_test_process_that_crashes_hangs_or_lies_is_a_failed_turn(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr(pair_check, "DEVICE_TIMEOUT", 0.5)
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, "-c", program], **options),
    )
    reports: list[TurnReport] = []

    def submit(report: TurnReport) -> NextTurn:
        reports.append(report)
        return NextTurn(0, done=True)

    assert run_pair_check("127.0.0.1:1", "job", 0, submit) == NextTurn(0, done=True)
    assert reports == [TurnReport(DEVICE_TURN)]


def test_the_rendezvous_server_does_not_import_torch() -> None:
    """It runs on login nodes, and decides there which nodes are bad."""
    code = "import sys, zero2all.cluster.launch.rendezvous_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
