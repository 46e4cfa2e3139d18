"""Faults of the membership of a job: bad nodes that it excludes, and spares that it takes in."""

from __future__ import annotations

import os
import signal

from zero2all.chaos.node_faults import simulated_cluster
from zero2all.chaos.scenario import Scenario, expect_status

EXCLUDED_MESSAGE = "this node is excluded: only its ranks fail after step"
REFUSED_MESSAGE = "is excluded from the job"
SPARE_MESSAGE = "waits as a spare"
SLOW_NODE_MESSAGE = "fails the node test"


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
        processes = [cluster.start(number, nodes=(2, 2)) for number in range(2)]
        scenario.wait_until_triggered()
        spare = cluster.start(2, nodes=(2, 2))
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
