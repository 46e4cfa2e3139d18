"""Faults of nodes: each simulated node has its own memory, and the rendezvous runs on one that never fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.chaos.scenario import Scenario
from tests.chaos.shifted_clock import CLOCK_VARIABLE, set_clock
from tests.chaos.simulated_nodes import SimulatedNetwork, simulated_network
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import Z2aError
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.cluster.launch.job_secret import new_secret

PORT = 29500
RANKS_PER_NODE = 2
SAVING_MESSAGE = "telling the ranks to save"
NODES_CHANGE_MESSAGE = "the nodes of the job change"
NodeProcess = subprocess.Popen[bytes]


class SimulatedCluster:
    """Nodes, and a login node that runs the rendezvous."""

    def __init__(self, scenario: Scenario, network: SimulatedNetwork) -> None:
        self.scenario, self._network = scenario, network
        *self.nodes, self.login = network.nodes
        scenario.environment[JOB_SECRET_VARIABLE] = new_secret()
        self.options: dict[str, Any] = {}
        """Of every start of a node."""
        self._rendezvous_process: NodeProcess | None = None

    def start_rendezvous(self) -> NodeProcess:
        words = ["launch", "--rendezvous-only", "--rdzv-listen", f"{self.login.ip}:{PORT}"]
        command = self.login.command(sys.executable, "-m", "zero2all.cli", *words)
        environment = {**os.environ, **self.scenario.environment}
        self._rendezvous_process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        return self._rendezvous_process

    def start(self, number: int, rendezvous_endpoint: str | None = None, **options: Any) -> NodeProcess:
        endpoint = {"rdzv_endpoint": rendezvous_endpoint or f"{self.login.ip}:{PORT}"}
        return self.scenario.start(
            RANKS_PER_NODE, self.nodes[number], **{"nodes": (1, 2), **endpoint, **self.options, **options}
        )

    def rejoin(self, number: int, survivor: NodeProcess) -> None:
        """Start a node again once the survivor trains, and let both of them finish."""
        self.scenario.wait_until_triggered(1)
        returned = self.start(number)
        self.scenario.wait_for_message(NODES_CHANGE_MESSAGE)
        self.scenario.release(1)
        self.expect_success(survivor, returned)

    def expect_success(self, *processes: NodeProcess) -> None:
        for process in processes:
            if (status := self.scenario.wait(process)) != 0:
                raise Z2aError(f"a node ended with status {status}")

    def power_cycle(self, number: int) -> None:
        """Kills everything that runs on the node, and clears its memory."""
        self._network.power_cycle(self.nodes[number])

    def wait_until_staged(self, number: int, step: int, replicas: bool = False) -> None:
        """Until every rank of the node has a flash checkpoint of this step, or a later one, in the node's memory; with
        ``replicas``, until the node has as many of other nodes."""
        memory = self.nodes[number].path(self.scenario.flash_dir)

        def staged() -> bool:
            finished = [slot for slot in find_staged_slots(memory) if slot.header.hash is not None]
            found = {slot.rank for slot in finished if slot.header.step >= step and slot.replica == replicas}
            return len(found) >= RANKS_PER_NODE

        kind = "replicas" if replicas else "a flash checkpoint"
        self.scenario.wait_until(staged, f"node {number} has {kind} of step {step}")

    def close(self) -> None:
        if self._rendezvous_process is not None:
            self._rendezvous_process.kill()
            self._rendezvous_process.wait()


@contextmanager
def simulated_cluster(scenario: Scenario, nodes: int = 2) -> Iterator[SimulatedCluster]:
    with simulated_network(nodes + 1) as network:
        simulated = SimulatedCluster(scenario, network)
        try:
            yield simulated
        finally:
            scenario.terminate()
            simulated.close()


@contextmanager
def held_nodes(
    scenario: Scenario, machines: int = 2, running: int = 2, patient: bool = False, **options: Any
) -> Iterator[tuple[SimulatedCluster, list[NodeProcess]]]:
    """A job on ``running`` of the machines, which is held when the fault occurs. ``patient``: ranks are held while a
    node starts."""
    with simulated_cluster(scenario, machines) as cluster:
        cluster.options = {**options, **({"hang_after": 8 * scenario.hang_after} if patient else {})}
        cluster.start_rendezvous()
        processes = [cluster.start(number) for number in range(running)]
        scenario.wait_until_triggered()
        scenario.mark_trigger()
        yield cluster, processes


def lose_node(number: int, back: bool = False) -> Callable[[Scenario], None]:
    """One node loses power, for good or until it comes back."""

    def drive(scenario: Scenario) -> None:
        with held_nodes(scenario, patient=True) as (cluster, processes):
            cluster.power_cycle(number)
            scenario.release()
            processes[number].wait()
            if back:
                cluster.rejoin(number, processes[1 - number])
            else:
                cluster.expect_success(processes[1 - number])

    return drive


def replace_node(scenario: Scenario, replicas: bool = True, by: int = 1) -> None:
    """A node loses power. It comes back with empty memory, or, with ``by=2``, another machine takes its place. With
    replicas it gets its states from the other node."""
    with held_nodes(scenario, max(2, by + 1), patient=True, nodes=(2, 2)) as (cluster, processes):
        for number in range(2):
            cluster.wait_until_staged(number, 12)
            if replicas:
                cluster.wait_until_staged(number, 12, replicas=True)
        if not replicas:
            scenario.wait_for_checkpoint()  # on a busy machine it is written later than the states in memory
        scenario.mark_trigger()
        cluster.power_cycle(1)
        scenario.release()
        processes[1].wait()
        cluster.expect_success(processes[0], cluster.start(by))


def replace_nodes_in_turn(scenario: Scenario) -> None:
    """Both nodes lose power and come back with empty memory, the second when the first has its states again."""
    with held_nodes(scenario, patient=True, nodes=(2, 2)) as (cluster, processes):
        for number, (lost, step) in enumerate(((1, 12), (0, 16))):
            scenario.wait_until_triggered(number)
            for node in range(2):
                cluster.wait_until_staged(node, step, replicas=True)
            if number == 0:
                scenario.mark_trigger()
            cluster.power_cycle(lost)
            scenario.release(number)
            processes[lost].wait()
            processes[lost] = cluster.start(lost)
        cluster.expect_success(*processes)


def disconnect_node(scenario: Scenario) -> None:
    """A node stays alive, but no packet reaches it or leaves it."""
    with held_nodes(scenario) as (cluster, processes):
        cluster.nodes[1].disconnect()
        scenario.release()
        cluster.expect_success(processes[0])
        cluster.nodes[1].kill_all()


def isolate_node(scenario: Scenario) -> None:
    """A node is cut off, the other continues alone; then the node returns, with its memory as it was."""
    with held_nodes(scenario, patient=True) as (cluster, processes):
        cluster.wait_until_staged(1, 12)
        scenario.wait_for_checkpoint()
        scenario.mark_trigger()
        node = cluster.nodes[1]
        node.disconnect()
        node.kill_all()
        processes[1].wait()
        node.connect()
        scenario.release(0)
        cluster.rejoin(1, processes[0])


def suspend_node(scenario: Scenario) -> None:
    """Every process of a node is stopped for longer than a heartbeat may be late, and continues after its replacement.

    Its ranks then are of a round that is over: they must write nothing.
    """
    with held_nodes(scenario, patient=True) as (cluster, processes):
        cluster.nodes[1].suspend()
        scenario.release(0)
        scenario.wait_until_triggered(1)  # the other node is training alone
        cluster.nodes[1].resume()
        scenario.wait_for_message(NODES_CHANGE_MESSAGE)
        scenario.release(1)
        cluster.expect_success(*processes)


def jump_clock(scenario: Scenario) -> None:
    """The clock of a node jumps an hour ahead, then two hours back, and a rank of the other node is killed."""
    clock = scenario.directory / "clock"
    set_clock(clock, 0)
    with simulated_cluster(scenario) as cluster:
        cluster.start_rendezvous()
        processes = [cluster.start(0)]
        scenario.environment[CLOCK_VARIABLE] = str(clock)
        processes.append(cluster.start(1))
        for number, ahead in enumerate((3600, -3600)):
            scenario.wait_until_triggered(number)
            set_clock(clock, ahead)
            scenario.release(number)
        cluster.expect_success(*processes)


def restart_rendezvous(scenario: Scenario) -> None:
    """The rendezvous is killed and started again, with none of its state."""
    with held_nodes(scenario) as (cluster, processes):
        cluster.close()
        cluster.start_rendezvous()
        scenario.wait_for_message(SAVING_MESSAGE, len(processes))
        scenario.release()
        cluster.expect_success(*processes)


def lose_rendezvous_node(scenario: Scenario) -> None:
    """Node 0 runs the rendezvous and is lost: the job ends with a message that says so; then it is started again."""
    with simulated_cluster(scenario) as cluster:
        endpoint = f"{cluster.nodes[0].ip}:{PORT}"
        processes = [cluster.start(0, endpoint), cluster.start(1, endpoint)]
        scenario.wait_until_triggered()
        scenario.mark_trigger()
        cluster.power_cycle(0)
        scenario.release()
        processes[0].wait()
        if scenario.wait(processes[1]) != 1:
            raise Z2aError("the surviving node ended with status 0")
        processes = [cluster.start(0, endpoint), cluster.start(1, endpoint)]
        cluster.expect_success(*processes)


def preempt_node(scenario: Scenario) -> None:
    """A scheduler preempts one node, with notice: it saves and leaves, and the other continues."""
    with held_nodes(scenario) as (cluster, processes):
        processes[1].send_signal(signal.SIGTERM)
        scenario.wait_for_message(SAVING_MESSAGE)
        scenario.release()
        if scenario.wait(processes[1]) != 1:
            raise Z2aError("the preempted node did not leave")
        cluster.expect_success(processes[0])


def abandon_histories(scenario: Scenario) -> None:
    """Nodes A and B, then A and C, then A and B again: B still holds checkpoints of an abandoned history.

    In that history a batch was corrupted, so its checkpoints are wrong. C starts with empty memory, so A and C resume
    from the last durable checkpoint; B returns with a flash checkpoint of the same step as one that A has by then.
    """
    with simulated_cluster(scenario, nodes=3) as cluster:
        cluster.start_rendezvous()
        _run_node_sequence(scenario, cluster, [(0, 1), (0, 2), (0, 1)])


def shrink_and_grow_nodes(scenario: Scenario) -> None:
    """Nodes A and B, then A alone, then both again: their flash checkpoints are valid, but of an abandoned history."""
    with simulated_cluster(scenario) as cluster:
        cluster.start_rendezvous()
        _run_node_sequence(scenario, cluster, [(0, 1), (0,), (0, 1)])


def _run_node_sequence(scenario: Scenario, cluster: SimulatedCluster, node_sets: list[tuple[int, ...]]) -> None:
    """Each set of nodes is held at a step and then killed on all of its nodes; their memory is kept."""
    *held, last = node_sets
    for number, node_set in enumerate(held):
        processes = [cluster.start(node, nodes=(len(node_set), len(node_set))) for node in node_set]
        scenario.wait_until_triggered(number)
        for node in node_set:
            cluster.wait_until_staged(node, 12)
        scenario.wait_for_checkpoint()
        scenario.mark_trigger()
        for node in node_set:
            cluster.nodes[node].kill_all()
        for process in processes:
            process.wait()
    cluster.expect_success(*(cluster.start(node, nodes=(len(last), len(last))) for node in last))
