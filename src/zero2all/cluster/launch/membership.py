"""The nodes of a job, and which of them are in the current round."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.rendezvous_messages import RendezvousSettings
from zero2all.cluster.launch.restart_policy import NodeKey

MAX_LOST_SHOWN = 3  # lost nodes that a message names


@dataclass
class Node:
    id: str
    name: str
    address: str
    """The address at which the other nodes reach it."""
    pid: int
    procs: int = 1
    """Ranks that it runs."""
    last_heard: float = 0.0
    waiting_since: float | None = None
    port: int = 0
    """A free port of that node, for the store of the ranks if it gets rank 0."""

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """The order of nodes is stable over restarts: ranks find their flash checkpoints in memory."""
        try:
            number = ip_address(self.address)
            return (number.version, int(number), self.name, self.pid, self.id)
        except ValueError:
            return (0, 0, f"{self.address} {self.name}", self.pid, self.id)

    @property
    def key(self) -> NodeKey:
        """Names the node, also after its agent was started again."""
        return (self.name, self.address)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass
class Membership:
    """
    >>> membership = Membership(RendezvousSettings((2,)))
    >>> membership.nodes["a"] = Node("a", "a", "10.0.0.1", pid=1, waiting_since=0.0)
    >>> membership.begin_round([membership.nodes["a"]])
    >>> membership.round_number, membership.active
    (1, {'a'})
    """

    settings: RendezvousSettings
    nodes: dict[str, Node] = field(default_factory=dict)
    """All that are connected, by their id."""
    round_number: int = 0
    members: list[str] = field(default_factory=list)
    """The nodes of the current round, or of the previous one while none runs."""
    active: set[str] = field(default_factory=set)
    """The members that are still in it."""
    is_changing: bool = False
    """Members were asked to return, or one has left."""
    lost: list[str] = field(default_factory=list)
    events: list[JobEvent] = field(default_factory=list)
    """What has happened since the round formed."""

    def waiting(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.waiting_since is not None]

    def drop(self, node: Node, *, is_lost: bool) -> None:
        """The node is no longer in the current round; if it ``is_lost``, its peers must not wait for it."""
        self.active.discard(node.id)
        if is_lost:
            self.lost.append(str(node))

    def lost_names(self) -> tuple[str, ...]:
        return tuple(self.lost[:MAX_LOST_SHOWN]) + ("others",) * (len(self.lost) > MAX_LOST_SHOWN)

    def begin_round(self, chosen: list[Node]) -> None:
        self.round_number += 1
        self.members = [node.id for node in chosen]
        self.active, self.lost, self.events, self.is_changing = set(self.members), [], [], False
        for node in chosen:
            node.waiting_since = None

    def assign_places(self, size: int) -> list[Node]:
        """Members of the previous round first, then spares; by address. If as many nodes run as before, members keep
        their ranks, and with them their checkpoints in memory: a spare gets the place of the node that is gone."""
        before = set(self.members)
        chosen = sorted(self.waiting(), key=lambda node: (node.id not in before, node.sort_key))[:size]
        if size != len(self.members):
            return sorted(chosen, key=lambda node: node.sort_key)
        stayed = {node.id: node for node in chosen if node.id in before}
        spares = (node for node in chosen if node.id not in before)
        return [stayed[id] if id in stayed else next(spares) for id in self.members]

    def round_events(self, chosen: list[Node]) -> tuple[JobEvent, ...]:
        """What the first node of the new round reports, before the state of the previous one is dropped."""
        if self.round_number == 0:
            return ()
        events, before = list(self.events), set(self.members)
        if before - {node.id for node in chosen}:
            new = [node for node in chosen if node.id not in before]
            events += [JobEvent("spare taken in", f"spare {node} is taken in", str(node)) for node in new]
        if self.lost:
            after = ", ".join(self.lost_names())
            nodes = f"{len(chosen)} node{'s' * (len(chosen) != 1)}"
            events.append(JobEvent("job restarted", f"the job restarts on {nodes} after a failure of {after}"))
        return tuple(events)
