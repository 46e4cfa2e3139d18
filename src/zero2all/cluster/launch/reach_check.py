"""Checks before the ranks start whether the nodes of a round reach each other where the ranks will connect.

Ranks that cannot connect would wait for minutes, and then name neither the address nor the direction. Each node listens
where its ranks will, tells the others through the rendezvous, and connects to them. In large jobs it tries only some of
them, so that its messages grow with the logarithm of their number.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from zero2all.base.network.addresses import NodeAddress
from zero2all.base.records import parse_record
from zero2all.cluster.doctor.reachability import (
    CONNECT_TIMEOUT,
    ProbeListener,
    ReachabilityResult,
    Target,
    Unreachable,
    ephemeral_ports,
    probe,
    unreachable,
)
from zero2all.cluster.launch.rendezvous_client import RendezvousStore
from zero2all.cluster.launch.rendezvous_messages import RankAssignment

MEETING_TIMEOUT = 8.0  # seconds for the other nodes to begin, and again to finish
MAX_ALL_PAIRS = 16  # nodes up to which every node tries every other
MAX_SHOWN = 6  # of the directions that do not work
MAX_READ = 256


@dataclass(frozen=True)
class ReachableNode:
    """What a node tells the others."""

    name: str
    data: Target
    is_mapped: bool
    was_checked: bool
    """Whether it has passed the check in an earlier round."""
    overlay_endpoint: str | None = None
    store_port: int | None = None
    """The port on which the store of the ranks listens; only of the first node."""


@dataclass(frozen=True)
class FailedProbe:
    found: Unreachable
    new_nodes: list[int]
    """The nodes of the two that have not passed the check before."""


@dataclass(frozen=True)
class ReachReport:
    """What the check found, the same on all nodes."""

    unreachable: tuple[Unreachable, ...] = ()
    new_nodes: frozenset[int] = frozenset()
    """Nodes at either end of a direction that does not work, if they have not worked before."""
    has_checked_nodes: bool = False
    """Whether some node of the round has passed the check before."""
    interrupted: bool = False
    """A node was lost meanwhile: another round must form anyway."""

    def __str__(self) -> str:
        shown = "\n".join(map(str, self.unreachable[:MAX_SHOWN]))
        more = len(self.unreachable) - MAX_SHOWN
        return shown + (f"\nand {more} more" if more > 0 else "")


@dataclass(frozen=True)
class ReachCheck:
    """The part of one node."""

    store: RendezvousStore
    secret: str
    assignment: RankAssignment
    address: NodeAddress
    store_port: int
    """The port of the ranks' store on this node."""
    was_checked: bool
    is_interrupted: Callable[[], bool]
    data_address: str = ""
    """The address of gloo's interface, if it is not the local one."""
    overlay_endpoint: str | None = None
    timeout: float = CONNECT_TIMEOUT

    def run(self) -> ReachReport:
        rank, address = self.assignment.rank, self.data_address or self.address.local
        with ExitStack() as stack:
            data = stack.enter_context(ProbeListener(address, 0, self._name(rank, "data"), self.secret))
            if rank == 0:
                local = ProbeListener(self.address.local, self.store_port, self._name(0, "store"), self.secret)
                stack.enter_context(local)
            target = Target(address, data.address.port, "data", ephemeral_ports())
            own = ReachableNode(
                socket.gethostname(),
                target,
                self.address.is_mapped,
                self.was_checked,
                self.overlay_endpoint,
                self.store_port if rank == 0 else None,
            )
            self.store.set(self._key(f"node/{rank}"), json.dumps(asdict(own)))
            if self.was_checked:
                self.store.add(self._key("checked"), 1)
            found = self._probe_all(self._peers())
            return ReachReport(interrupted=self.is_interrupted()) if found is None else self._collect(found)

    def _key(self, name: str) -> str:
        return f"reach/{self.assignment.round}/{name}"

    def _name(self, rank: int, purpose: str) -> str:
        return f"{self.assignment.round}/{rank}/{purpose}"

    def _peers(self) -> list[int]:
        return peers_to_try(self.assignment.rank, self.assignment.nodes)

    def _probe_all(self, peers: list[int]) -> list[FailedProbe] | None:
        """The probes that have failed; None if a node was lost, or has not come in time."""
        if not self._wait_for([self._key(f"node/{peer}") for peer in peers]):
            return None
        nodes = {
            peer: parse_record(ReachableNode, json.loads(self.store.get(self._key(f"node/{peer}"))), f"node {peer}")
            for peer in peers
        }
        tries = [(peer, node.data) for peer, node in nodes.items()]
        if 0 in nodes:
            inside = str(nodes[0].store_port or "")
            tries.append((0, Target(self.assignment.master, self.assignment.port, "store", inside)))

        def try_one(one: tuple[int, Target]) -> ReachabilityResult:
            peer, target = one
            return probe(target, self._name(peer, target.purpose), self.secret, self.timeout)

        with ThreadPoolExecutor(len(tries)) as pool:
            results = list(pool.map(try_one, tries))
        own = [] if self.was_checked else [self.assignment.rank]
        failed = []
        for (peer, target), result in zip(tries, results, strict=True):
            if result.problem is not None:
                node, local = nodes[peer], self.address.local
                way = unreachable(
                    node.name,
                    target,
                    result.problem,
                    is_mapped=node.is_mapped,
                    own_address=local,
                    overlay_endpoint=node.overlay_endpoint,
                )
                failed.append(FailedProbe(way, own + ([] if node.was_checked else [peer])))
        return failed

    def _collect(self, found: list[FailedProbe]) -> ReachReport:
        for one in found:
            number = self.store.add(self._key("failures"), 1)
            self.store.set(self._key(f"failure/{number}"), json.dumps(asdict(one)))
        if self.store.add(self._key("done"), 1) == self.assignment.nodes:
            self.store.set(self._key("complete"), "1")
        if not self._wait_for([self._key("complete")]):
            return ReachReport(interrupted=self.is_interrupted())
        count = min(MAX_READ, self.store.add(self._key("failures"), 0))
        values = self.store.multi_get([self._key(f"failure/{number}") for number in range(1, count + 1)])
        failed = [parse_record(FailedProbe, json.loads(value), "reachability") for value in values]
        found_by_all = sorted(
            (one.found for one in failed), key=lambda one: (one.source, one.node, one.target.purpose != "store")
        )
        return ReachReport(
            tuple(found_by_all),
            frozenset(rank for one in failed for rank in one.new_nodes),
            self.store.add(self._key("checked"), 0) > 0,
        )

    def _wait_for(self, keys: list[str]) -> bool:
        return self.store.wait_unless(keys, MEETING_TIMEOUT + self.timeout, self.is_interrupted)


def peers_to_try(rank: int, nodes: int) -> list[int]:
    """Every other node, or in a large job the first one and the nodes at distances of powers of two.

    >>> peers_to_try(3, 64)
    [0, 4, 5, 7, 11, 19, 35]
    """
    if nodes <= MAX_ALL_PAIRS:
        return [other for other in range(nodes) if other != rank]
    distances = (1 << bit for bit in range(nodes.bit_length()))
    return sorted({(rank + distance) % nodes for distance in distances if distance < nodes} | {0} - {rank})
