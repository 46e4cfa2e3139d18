"""Faults of the membership of a job: bad nodes that it excludes, and spares that it takes in."""

from __future__ import annotations

import os
import signal

from tests.chaos.fault import ELASTIC_LOSS_TOLERANCE, Fault, hold_rank, inject
from tests.chaos.node_faults import simulated_cluster
from tests.chaos.scenario import Scenario, expect_status
from tests.chaos.simulated_nodes import simulation_unavailable_reason

REFUSED_MESSAGE = "is excluded from the job"
SPARE_MESSAGE = "waits as a spare"


def exclude_bad_node(scenario: Scenario) -> None:
    """The ranks of one node fail at a step again and again: it leaves, is refused, and the other node finishes."""
    with simulated_cluster(scenario) as cluster:
        cluster.start_rendezvous()
        good, bad = cluster.start(0), cluster.start(1)
        expect_status(scenario.wait(bad), 1)
        expect_status(scenario.wait(cluster.start(1)), 1)  # it does not come back by itself
        cluster.expect_success(good)


def take_in_spare(scenario: Scenario) -> None:
    """Two nodes work and a third one waits; one of the two loses power."""
    with simulated_cluster(scenario, nodes=3) as cluster:
        cluster.start_rendezvous()
        hang_after = 8 * scenario.hang_after  # ranks are held while a node starts
        processes = [cluster.start(number, nodes=(2, 2), hang_after=hang_after) for number in range(2)]
        scenario.wait_until_triggered()
        spare = cluster.start(2, nodes=(2, 2), hang_after=hang_after)
        scenario.wait_until(lambda: SPARE_MESSAGE in scenario.log_text(), "the spare waits")
        scenario.mark_trigger()
        cluster.power_cycle(1)
        scenario.release()
        processes[1].wait()
        cluster.expect_success(processes[0], spare)


def find_slow_node(scenario: Scenario) -> None:
    """The network of one node is slow, and a rank elsewhere is killed: the node test finds the slow one."""
    with simulated_cluster(scenario, nodes=3) as cluster:
        cluster.start_rendezvous()
        processes = [cluster.start(number, nodes=(2, 3)) for number in range(3)]
        held = scenario.wait_until_triggered()
        scenario.mark_trigger()
        cluster.nodes[2].limit_bandwidth("1mbit")
        os.kill(held, signal.SIGKILL)
        expect_status(scenario.wait(processes[2]), 1)
        cluster.expect_success(*processes[:2])


MEMBERSHIP_FAULTS = (
    Fault(
        "a bad node is excluded",
        inject("leave", rank=2, times=3),
        exclude_bad_node,
        expected_messages=("this node is excluded: only its ranks fail after step", REFUSED_MESSAGE),
        loss_tolerance=ELASTIC_LOSS_TOLERANCE,
        unavailable_reason=simulation_unavailable_reason,
    ),
    Fault(
        "a spare is taken in",
        hold_rank(rank=1),
        take_in_spare,
        expected_kind="cut off",
        expected_messages=(SPARE_MESSAGE, "is taken in"),
        unavailable_reason=simulation_unavailable_reason,
    ),
    Fault(
        "a slow node is found and excluded",
        hold_rank(rank=1),
        find_slow_node,
        expected_messages=("fails the node test", REFUSED_MESSAGE),
        loss_tolerance=ELASTIC_LOSS_TOLERANCE,
        unavailable_reason=simulation_unavailable_reason,
    ),
)
