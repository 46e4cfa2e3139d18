"""Faults of whole nodes: machines of their own, each with its own memory, and the rendezvous on one that stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zero2all.chaos.machines import Network, a_network
from zero2all.chaos.scene import Scene
from zero2all.errors import Z2aError
from zero2all.resilience.flash import staged_in
from zero2all.resilience.secret import VARIABLE, new_secret

PORT = 29500
EACH = 2  # ranks on a node
TOLD = "telling the ranks to save"
Node = subprocess.Popen[bytes]


class Cluster:
    """Nodes and a login machine that holds the rendezvous."""

    def __init__(self, scene: Scene, network: Network) -> None:
        self.scene, self._network = scene, network
        *self.nodes, self.login = network.machines
        scene.environment[VARIABLE] = new_secret()
        self._store: Node | None = None

    def hold_rendezvous(self) -> Node:
        words = [sys.executable, "-m", "zero2all.cli", "rendezvous", "--port", str(PORT), "--listen", self.login.ip]
        environment = {**os.environ, **self.scene.environment}
        self._store = subprocess.Popen(self.login.command(*words), stderr=subprocess.DEVNULL, env=environment)
        return self._store

    def start(self, number: int, at: str | None = None, **options: Any) -> Node:
        options = {"nodes": (1, 2), "rendezvous": at or f"{self.login.ip}:{PORT}", **options}
        return self.scene.start(EACH, self.nodes[number], **options)

    def ended_well(self, *processes: Node) -> None:
        for process in processes:
            if (status := self.scene.wait(process)) != 0:
                raise Z2aError(f"a node ended with status {status}")

    def lose(self, number: int) -> None:
        """Its power is cut: everything that ran there ends, and what it kept in memory is gone."""
        self._network.power_cycle(self.nodes[number])

    def until_staged(self, number: int, step: int) -> None:
        """Until every rank of a node has the state after that step, or a later one, in the node's memory."""
        memory = self.nodes[number].path(self.scene.memory)

        def staged() -> bool:
            return len({slot.rank for slot in staged_in(memory) if slot.hash is not None and slot.step >= step}) >= EACH

        self.scene.until(staged, f"node {number} has the state of step {step} in memory")

    def close(self) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.wait()


@contextmanager
def cluster(scene: Scene, nodes: int = 2) -> Iterator[Cluster]:
    with a_network(nodes + 1) as network:
        found = Cluster(scene, network)
        try:
            yield found
        finally:
            scene.end()
            found.close()


def lose_node(number: int, back: bool = False) -> Callable[[Scene], None]:
    """One node's power is cut, for good or until it comes back."""

    def drive(scene: Scene) -> None:
        with cluster(scene) as nodes:
            nodes.hold_rendezvous()
            patient = 8 * scene.hang_after  # ranks are held while a node starts
            processes = [nodes.start(number, hang_after=patient) for number in range(2)]
            scene.until_struck()
            scene.strike()
            nodes.lose(number)
            scene.let_go()
            processes[number].wait()
            stays = processes[1 - number]
            if not back:
                nodes.ended_well(stays)
                return
            scene.until_struck(1)  # those that stayed are training again
            again = nodes.start(number, hang_after=patient)
            scene.until(lambda: "the nodes of the job change" in scene.said(), "the one that came back is seen")
            scene.let_go(1)
            nodes.ended_well(stays, again)

    return drive


def cut_cable(scene: Scene) -> None:
    """A node is alive, and nobody hears it."""
    with cluster(scene) as nodes:
        nodes.hold_rendezvous()
        processes = [nodes.start(0), nodes.start(1)]
        scene.until_struck()
        scene.strike()
        nodes.nodes[1].pull_the_cable()
        scene.let_go()
        nodes.ended_well(processes[0])
        nodes.nodes[1].kill_all()


def restart_rendezvous(scene: Scene) -> None:
    """The place where they meet is started anew: all that it knew is gone."""
    with cluster(scene) as nodes:
        store = nodes.hold_rendezvous()
        processes = [nodes.start(0), nodes.start(1)]
        scene.until_struck()
        scene.strike()
        store.kill()
        store.wait()
        nodes.hold_rendezvous()
        scene.until(lambda: scene.said().count(TOLD) >= len(processes), "both nodes have seen it")
        scene.let_go()
        nodes.ended_well(*processes)


def lose_the_holder(scene: Scene) -> None:
    """Without a rendezvous of its own: the node that held it is gone, and the job ends and says so; then again."""
    with cluster(scene) as nodes:
        place = f"{nodes.nodes[0].ip}:{PORT}"
        processes = [nodes.start(0, place), nodes.start(1, place)]
        scene.until_struck()
        scene.strike()
        nodes.lose(0)
        scene.let_go()
        processes[0].wait()
        if scene.wait(processes[1]) != 1:
            raise Z2aError("the node that was left alone ended well")
        processes = [nodes.start(0, place), nodes.start(1, place)]
        nodes.ended_well(*processes)


def preempt_node(scene: Scene) -> None:
    """A scheduler takes one node back, with notice: it saves and leaves, and the other goes on."""
    with cluster(scene) as nodes:
        nodes.hold_rendezvous()
        processes = [nodes.start(0), nodes.start(1)]
        scene.until_struck()
        scene.strike()
        processes[1].send_signal(signal.SIGTERM)
        scene.until(lambda: TOLD in scene.said(), "its ranks were told")
        scene.let_go()
        if scene.wait(processes[1]) != 1:
            raise Z2aError("the node that was told to leave did not")
        nodes.ended_well(processes[0])


def other_histories(scene: Scene) -> None:
    """Nodes A and B, then A and C, then A and B again: B still holds states of a history that was given up.

    In that history a batch was spoiled, so that its states are wrong. C comes with empty memory, so A and C begin at
    the last durable state; B comes back with a state in memory of the same step as one that A has by then.
    """
    with cluster(scene, nodes=3) as nodes:
        nodes.hold_rendezvous()
        _change_of_nodes(scene, nodes, [(0, 1), (0, 2), (0, 1)])


def fewer_and_more_nodes(scene: Scene) -> None:
    """Nodes A and B, then A alone, then both again: their states in memory are whole, and of a history given up."""
    with cluster(scene) as nodes:
        nodes.hold_rendezvous()
        _change_of_nodes(scene, nodes, [(0, 1), (0,), (0, 1)])


def _change_of_nodes(scene: Scene, nodes: Cluster, turns: list[tuple[int, ...]]) -> None:
    """Each turn is held at a step and then killed on all of its nodes; what they kept in memory stays there."""
    *held, last = turns
    for number, turn in enumerate(held):
        processes = [nodes.start(node, nodes=(len(turn), len(turn))) for node in turn]
        scene.until_struck(number)
        for node in turn:
            nodes.until_staged(node, 12)
        scene.until(lambda: scene.open().checkpoints.newest() is not None, "there is a checkpoint")
        scene.strike()
        for node in turn:
            nodes.nodes[node].kill_all()
        for process in processes:
            process.wait()
    nodes.ended_well(*(nodes.start(node, nodes=(len(last), len(last))) for node in last))
