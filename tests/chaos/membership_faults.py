"""Faults of the membership of a job: bad nodes that it excludes, and spares that it takes in."""

from __future__ import annotations

import os
import signal

from tests.chaos.fault import elastic_fault, hold_rank, inject, node_fault
from tests.chaos.node_faults import held_nodes, simulated_cluster
from tests.chaos.scenario import Scenario, expect_status

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
    with held_nodes(scenario, machines=3, patient=True, nodes=(2, 2)) as (cluster, processes):
        spare = cluster.start(2)
        scenario.wait_for_message(SPARE_MESSAGE)
        scenario.mark_trigger()
        cluster.power_cycle(1)
        scenario.release()
        processes[1].wait()
        cluster.expect_success(processes[0], spare)


def find_slow_node(scenario: Scenario) -> None:
    """The network of one node is slow, and a rank elsewhere is killed: the node test finds the slow one."""
    with held_nodes(scenario, machines=3, running=3, nodes=(2, 3)) as (cluster, processes):
        cluster.nodes[2].limit_bandwidth("1mbit")
        os.kill(scenario.wait_until_triggered(), signal.SIGKILL)
        expect_status(scenario.wait(processes[2]), 1)
        cluster.expect_success(*processes[:2])


MEMBERSHIP_FAULTS = (
    elastic_fault(
        "a bad node is excluded",
        inject("leave", rank=2, times=3),
        exclude_bad_node,
        expected_kind="crash",
        expected_messages=("this node is excluded: only its ranks fail after step", REFUSED_MESSAGE),
    ),
    node_fault(
        "a spare is taken in",
        hold_rank(rank=1),
        take_in_spare,
        expected_kind="cut off",
        expected_messages=(SPARE_MESSAGE, "is taken in"),
    ),
    elastic_fault(
        "a slow node is found and excluded",
        hold_rank(rank=1),
        find_slow_node,
        expected_kind="crash",
        expected_messages=("fails the node test", REFUSED_MESSAGE),
    ),
)
