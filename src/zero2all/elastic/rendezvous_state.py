"""Membership of a job: the decisions of the rendezvous, without sockets, threads or clocks of its own.

Nodes register, and wait for a round. A round forms when enough of them wait and no more are expected; each member gets
its rank, in order of addresses. When a member is lost or has failed, the others are notified, return and wait for
the next round. Times are of the rendezvous's own monotonic clock: those of the nodes do not matter.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from zero2all.errors import UsageError

Outcome = Literal["done", "failed"]
MAX_LOST_SHOWN = 3  # lost nodes that a message names


@dataclass(frozen=True)
class RendezvousSettings:
    """The same on every node of a job."""

    counts: tuple[int, ...]
    """Node counts that the job can run on, ascending."""
    settle: float = 10.0
    """Seconds without a new node after which no more are expected, at the start and while the job is running,"""
    last_call: float = 3.0
    """after a loss, where the job is waiting,"""
    longest_call: float = 60.0
    """and the longest time that new nodes can delay a round; also the shortest that a round runs before it is ended for
    new nodes, unless they complete the job: nodes that come one after another do not restart it one by one."""
    dead_after: float = 10.0
    """Seconds without a heartbeat after which a node is lost."""

    def __post_init__(self) -> None:
        if not self.counts or list(self.counts) != sorted(set(self.counts)) or self.counts[0] < 1:
            raise UsageError(f"node counts must be ascending and positive, not {self.counts}")

    @property
    def max_nodes(self) -> int:
        return self.counts[-1]

    def usable_nodes(self, nodes: int) -> int:
        """The largest node count of the job that is at most ``nodes``."""
        smaller = bisect_right(self.counts, nodes)
        return self.counts[smaller - 1] if smaller else 0


@dataclass
class Node:
    id: str
    name: str
    address: str
    """At which the other nodes reach it."""
    pid: int
    procs: int = 1
    """Ranks that it runs."""
    last_heard: float = 0.0
    waiting_since: float | None = None
    port: int = 0
    """Free on that node, for the store of the ranks if it gets rank 0."""

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """Stable over restarts: ranks find their flash checkpoints in memory."""
        try:
            number = ip_address(self.address)
            return (number.version, int(number), self.name, self.pid, self.id)
        except ValueError:
            return (0, 0, f"{self.address} {self.name}", self.pid, self.id)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class RankAssignment:
    """The assignment of one member of a round."""

    round: int
    rank: int
    nodes: int
    first_rank: int
    """Of those on this node; ``rank`` is the node's own."""
    ranks: int
    """In all."""
    master: str
    port: int


@dataclass(frozen=True)
class RendezvousStatus:
    """Sent to every node when it changes, which is a few times for each round, however many nodes return one by one."""

    running: int = 0
    """Nodes that the current round began with; 0 once all have returned."""
    change: bool = False
    """Members must save and return, for a larger round or one without a node that left."""
    lost: tuple[str, ...] = ()
    """Members that are gone or have failed: their peers must not wait for them. The first few are named."""
    closed: Outcome | None = None


@dataclass
class RendezvousState:
    """
    >>> state = RendezvousState(RendezvousSettings((2,)))
    >>> for name in "ab":
    ...     state.register(Node(name, name, f"10.0.0.{ord(name)}", pid=1), now=0.0)
    ...     state.join_next_round(name, port=4000, now=0.0)
    >>> {name: assignment.rank for name, assignment in state.advance(now=0.1).items()}
    {'a': 0, 'b': 1}
    """

    settings: RendezvousSettings
    nodes: dict[str, Node] = field(default_factory=dict)
    round_number: int = 0
    closed: Outcome | None = None
    _members: list[str] = field(default_factory=list)
    """Of the current round, or of the previous one while none runs."""
    _active: set[str] = field(default_factory=set)
    """Those that are still in it."""
    _lost: list[str] = field(default_factory=list)
    _membership_changing: bool = False
    """Members were asked to return, or one has left."""
    _last_arrival: float = 0.0
    """When a node last began to wait."""
    _enough_since: float | None = None
    _formed: float = 0.0
    """When the current round began."""
    _last_advance: float | None = None
    _failed_at: dict[int, set[str]] = field(default_factory=dict)

    def register(self, node: Node, now: float) -> None:
        node.last_heard = now
        self.nodes[node.id] = node

    def record_heartbeat(self, id: str, now: float) -> None:
        if id in self.nodes:
            self.nodes[id].last_heard = now

    def join_next_round(self, id: str, port: int, now: float, failed: bool = False) -> None:
        """A node joins the next round. ``failed``: its ranks failed in the current one."""
        node = self.nodes[id]
        node.waiting_since, node.port, node.last_heard, self._last_arrival = now, port, now, now
        if id in self._active:
            self._active.discard(id)
            self._membership_changing = True
            if failed:
                self._lost.append(str(node))

    def leave(self, id: str, gracefully: bool) -> None:
        """``gracefully``: its ranks have saved and exited. Otherwise it is lost."""
        node = self.nodes.pop(id, None)
        if node is None or id not in self._active:
            return
        self._active.discard(id)
        self._membership_changing = True
        if not gracefully:
            self._lost.append(str(node))

    def close(self, outcome: Outcome) -> None:
        self.closed = self.closed or outcome

    def report_failure(self, id: str, step: int) -> tuple[int, bool]:
        """A node fails at a step repeatedly: on how many nodes the job could run without it, and whether others
        have failed there as well."""
        others = self._failed_at.setdefault(step, set()) - {id}
        self._failed_at[step].add(id)
        return self.settings.usable_nodes(len(self.nodes.keys() - {id} - others)), bool(others)

    def advance(self, now: float) -> dict[str, RankAssignment]:
        """Mark silent nodes as lost, and form a round if possible; returns the assignments of its members."""
        if self._last_advance is not None and now - self._last_advance > self.settings.dead_after / 2:
            for node in self.nodes.values():  # this process was suspended, and received nothing
                node.last_heard = now
        self._last_advance = now
        for id in [id for id, node in self.nodes.items() if now - node.last_heard > self.settings.dead_after]:
            self.leave(id, gracefully=False)
        self._membership_changing = self._membership_changing or self._can_grow(now)
        return {} if self.closed is not None or self._active else self._form_round(now)

    def status(self) -> RendezvousStatus:
        lost = tuple(self._lost[:MAX_LOST_SHOWN]) + ("others",) * (len(self._lost) > MAX_LOST_SHOWN)
        running = len(self._members) if self._active else 0
        return RendezvousStatus(running, bool(self._active) and self._membership_changing, lost, self.closed)

    def _waiting(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.waiting_since is not None]

    def _can_grow(self, now: float) -> bool:
        waiting = self._waiting()
        if not self._active or not waiting:
            return False
        if self.settings.usable_nodes(len(self._active) + len(waiting)) <= len(self._members):
            return False
        if len(self._active) + len(waiting) >= self.settings.max_nodes:
            return True
        if now - self._formed < self.settings.longest_call:
            return False
        first = min(node.waiting_since or now for node in waiting)
        return self._settled(now, first, self.settings.settle)

    def _settled(self, now: float, since: float, quiet_period: float) -> bool:
        return now - self._last_arrival >= quiet_period or now - since >= self.settings.longest_call

    def _form_round(self, now: float) -> dict[str, RankAssignment]:
        waiting = self._waiting()
        size = self.settings.usable_nodes(len(waiting))
        if size == 0:
            self._enough_since = None
            return {}
        if self._enough_since is None:
            self._enough_since = now
        again = self.round_number > 0
        as_large_as_before = again and size >= len(self._members)
        quiet_period = self.settings.last_call if again else self.settings.settle
        if (
            size < self.settings.max_nodes
            and not as_large_as_before
            and not self._settled(now, self._enough_since, quiet_period)
        ):
            return {}
        before = set(self._members)
        chosen = sorted(waiting, key=lambda node: (node.id not in before, node.sort_key))[:size]
        chosen.sort(key=lambda node: node.sort_key)
        self.round_number += 1
        self._formed = now
        self._members = [node.id for node in chosen]
        self._active, self._lost, self._membership_changing, self._enough_since = set(self._members), [], False, None
        for node in chosen:
            node.waiting_since = None
        master, ranks = chosen[0], sum(node.procs for node in chosen)
        assignments, first_rank = {}, 0
        for rank, node in enumerate(chosen):
            assignments[node.id] = RankAssignment(
                self.round_number, rank, size, first_rank, ranks, master.address, master.port
            )
            first_rank += node.procs
        return assignments
