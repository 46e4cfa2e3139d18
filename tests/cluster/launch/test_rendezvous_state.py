"""Decisions of the rendezvous, with a fake clock."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.base.errors import UsageError
from zero2all.cluster.launch.membership import Node
from zero2all.cluster.launch.rendezvous_messages import RankAssignment, RendezvousSettings
from zero2all.cluster.launch.rendezvous_state import RendezvousState

SETTLED = 11.0


class Cluster:
    """Nodes that join, wait, send heartbeats and leave as the test directs."""

    def __init__(self, *counts: int) -> None:
        self.state, self.now = RendezvousState(RendezvousSettings(counts)), 0.0
        self.assignments: dict[str, RankAssignment] = {}

    def join(self, *names: str) -> Cluster:
        for name in names:
            self.state.register(Node(name, name, f"10.0.0.{int(name)}", pid=1, procs=2), self.now)
            self.wait(name)
        return self

    def wait(self, *names: str, failed: bool = False) -> None:
        for name in names:
            self.state.join_next_round(name, 4000 + int(name), self.now, failed=failed)
        self.pass_time(0.0)

    def pass_time(self, seconds: float, silent: tuple[str, ...] = ()) -> None:
        end = self.now + seconds
        while True:
            for name in self.state.membership.nodes.keys() - set(silent):
                self.state.record_heartbeat(name, self.now)
            self.assignments |= self.state.advance(self.now)
            if self.now >= end:
                return
            self.now = min(end, self.now + 1.0)

    def ranks(self) -> dict[str, int]:
        number = self.state.membership.round_number
        return {name: assignment.rank for name, assignment in self.assignments.items() if assignment.round == number}


def test_a_round_forms_when_all_nodes_have_joined() -> None:
    cluster = Cluster(2).join("9")
    assert cluster.assignments == {}
    cluster.join("10")
    assert cluster.ranks() == {"9": 0, "10": 1}, "by address, as a number"
    assert [cluster.assignments[name].first_rank for name in ("9", "10")] == [0, 2]
    assert {(assignment.ranks, assignment.master, assignment.port) for assignment in cluster.assignments.values()} == {
        (4, "10.0.0.9", 4009)
    }


def test_ranks_do_not_depend_on_the_order_of_arrival() -> None:
    names = [str(number) for number in range(1, 40)]
    for seed in range(5):
        cluster = Cluster(39).join(*random.Random(seed).sample(names, len(names)))
        assert cluster.ranks() == {name: number for number, name in enumerate(names)}


def test_nodes_that_join_within_a_minute_are_one_round() -> None:
    """A thousand nodes that start over a minute were restarted in waves of three seconds."""
    cluster = Cluster(*range(1, 1001))
    order = random.Random(1).sample(range(1, 201), 200)
    for number in order[:60]:
        cluster.join(str(number))
        cluster.pass_time(0.25)
    assert cluster.state.membership.round_number == 0
    cluster.pass_time(SETTLED)
    assert (cluster.state.membership.round_number, len(cluster.ranks())) == (1, 60)
    for number in order[60:]:  # very late: they are admitted together
        cluster.join(str(number))
        assert not cluster.state.status().change
        cluster.pass_time(0.25)
    cluster.pass_time(SETTLED)
    assert not cluster.state.status().change, "the round has run for less than a minute"
    cluster.pass_time(RendezvousSettings.longest_call)
    assert cluster.state.status().change
    cluster.wait(*list(cluster.ranks()))
    assert (cluster.state.membership.round_number, len(cluster.ranks())) == (2, 200)


def test_a_trickle_of_nodes_cannot_delay_the_start_forever() -> None:
    cluster = Cluster(*range(1, 1001))
    for number in range(1, 15):
        cluster.join(str(number))
        cluster.pass_time(8.0)
    assert cluster.state.membership.round_number == 1


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    slowest=st.integers(0, 20),
    least=st.integers(1, 4),
)
def test_no_pattern_of_arrivals_restarts_a_job_once_for_each_node(
    arrivals: list[int], slowest: int, least: int
) -> None:
    """Whenever nodes come: rounds are a minute apart but for the one that is complete, and in the end all are in."""
    cluster, shortest = Cluster(*range(least, len(arrivals) + least)), RendezvousSettings.longest_call
    rounds: list[tuple[float, int]] = []
    asked: float | None = None
    for second in range(max(arrivals) + 200):
        cluster.join(*[str(number) for number, when in enumerate(arrivals, 1) if when == second])
        cluster.pass_time(1.0)
        if cluster.state.status().change:
            asked = cluster.now if asked is None else asked
            if cluster.now - asked >= slowest:  # to save
                cluster.wait(
                    *[name for name, node in cluster.state.membership.nodes.items() if node.waiting_since is None]
                )
        if cluster.state.membership.round_number > len(rounds):
            rounds.append((cluster.now, len(cluster.ranks())))
            asked = None
    assert all(
        later - earlier >= shortest or size == cluster.state.membership.settings.max_nodes
        for (earlier, _), (later, size) in itertools.pairwise(rounds)
    )
    assert len(rounds) <= 2 + (max(arrivals) + slowest) / shortest
    if len(arrivals) >= least:
        assert rounds[-1][1] == len(arrivals)


def test_the_status_changes_a_few_times_however_many_members_return() -> None:
    """It is sent to every node: a change for each of a thousand that return would be a million messages."""
    names = [str(number) for number in range(1, 101)]
    cluster = Cluster(*range(50, 101)).join(*names)
    statuses = [cluster.state.status()]
    cluster.state.leave("50", gracefully=False)
    for name in [name for name in names if name != "50"]:
        cluster.wait(name, failed=True)
        if cluster.state.status() != statuses[-1]:
            statuses.append(cluster.state.status())
    assert len(statuses) <= 6
    assert statuses[-2].lost == ("50 (10.0.0.50)", "1 (10.0.0.1)", "2 (10.0.0.2)", "others")
    assert statuses[-1].running == 0, "all have returned"


def test_a_silent_node_is_lost_and_its_peers_are_notified() -> None:
    cluster = Cluster(1, 2).join("1", "2")
    cluster.pass_time(9.0, silent=("2",))
    assert cluster.state.status().lost == ()
    cluster.pass_time(3.0, silent=("2",))
    assert cluster.state.status().lost == ("2 (10.0.0.2)",)
    cluster.wait("1", failed=True)
    cluster.pass_time(4.0)
    assert (cluster.state.membership.round_number, cluster.ranks()) == (2, {"1": 0})
    assert cluster.state.status().lost == ()


def test_a_rendezvous_that_was_suspended_loses_no_node() -> None:
    cluster = Cluster(2).join("1", "2")
    cluster.now += 3600.0
    assert cluster.state.advance(cluster.now) == {}
    assert cluster.state.status().lost == ()
    assert len(cluster.state.membership.nodes) == 2


def test_a_node_that_leaves_gracefully_is_not_lost() -> None:
    cluster = Cluster(1, 2).join("1", "2")
    cluster.state.leave("2", gracefully=True)
    assert (cluster.state.status().change, cluster.state.status().lost) == (True, ())
    cluster.wait("1")
    cluster.pass_time(4.0)
    assert cluster.ranks() == {"1": 0}


def test_members_that_return_on_request_are_not_lost() -> None:
    cluster = Cluster(1, 2, 3).join("1", "2")
    cluster.pass_time(SETTLED)
    cluster.join("3")
    assert cluster.state.status().change, "that makes all"
    cluster.wait("1")
    assert cluster.state.status().lost == (), "the second is saving"
    cluster.wait("2")
    assert cluster.ranks() == {"1": 0, "2": 1, "3": 2}


def test_a_failure_restarts_all_members_at_once() -> None:
    cluster = Cluster(1, 2, 3).join("1", "2")
    cluster.pass_time(SETTLED)
    cluster.wait("2", failed=True)
    assert cluster.state.status().lost == ("2 (10.0.0.2)",)
    cluster.wait("1", failed=True)
    assert cluster.state.membership.round_number == 2, "no node is missing, so the round forms at once"


def test_the_loss_of_a_member_while_a_round_forms() -> None:
    """Any member: rank 0 has no special role."""
    for lost in ("1", "2", "3"):
        cluster = Cluster(2, 3).join("1", "2", "3")
        cluster.wait("1", failed=True)
        cluster.state.leave(lost, gracefully=False)
        for name in sorted({"1", "2", "3"} - {lost}):
            cluster.wait(name, failed=True)
        cluster.pass_time(4.0)
        assert (cluster.state.membership.round_number, len(cluster.ranks())) == (2, 2)


def test_a_node_that_the_layout_cannot_use_waits() -> None:
    """Sixteen ranks a group on nodes of eight: of three nodes two can work."""
    cluster = Cluster(2, 4).join("1", "2", "3", "4")
    assert cluster.state.membership.round_number == 1
    cluster.state.leave("2", gracefully=False)
    cluster.wait("1", "3", "4", failed=True)
    cluster.pass_time(4.0)
    assert cluster.ranks() == {"1": 0, "3": 1}
    cluster.pass_time(2 * SETTLED)
    assert not cluster.state.status().change, "the spare is no reason to start again"
    cluster.join("2")
    assert cluster.state.status().change
    cluster.wait("1", "3")
    assert cluster.ranks() == {"1": 0, "2": 1, "3": 2, "4": 3}


def test_too_few_wait_for_others_and_a_spare_takes_the_place_of_a_lost_one() -> None:
    cluster = Cluster(2, 4).join("1", "2")
    cluster.pass_time(SETTLED)
    cluster.join("3")
    cluster.state.leave("1", gracefully=False)
    cluster.wait("2", failed=True)
    cluster.pass_time(4.0)
    assert cluster.ranks() == {"2": 1, "3": 0}, "who stays keeps its rank, and the checkpoints in its memory"
    cluster.state.leave("3", gracefully=False)
    cluster.wait("2", failed=True)
    cluster.pass_time(100.0)
    assert cluster.state.status().running == 0


def test_closing_is_for_all_and_the_first_outcome_counts() -> None:
    cluster = Cluster(1, 2).join("1")
    cluster.state.close("done")
    cluster.state.close("failed")
    cluster.pass_time(100.0)
    assert (cluster.state.membership.round_number, cluster.state.status().closed) == (0, "done")


def test_settings_with_invalid_node_counts_are_refused() -> None:
    for counts in ((), (0, 1), (3, 2)):
        with pytest.raises(UsageError):
            RendezvousSettings(counts)
