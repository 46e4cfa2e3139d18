"""Which nodes run a job together: what the rendezvous decides, without sockets, threads or clocks of its own.

Nodes register, and wait for a round. A round forms when enough of them wait and no more seem to come; each member gets
its rank, by the order of addresses. When a member is lost or has failed, the others are told, come back and wait for
the next round. Times are of the rendezvous's own monotonic clock: those of the nodes do not matter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from zero2all.errors import UsageError

Outcome = Literal["done", "failed"]
SHOWN = 3  # lost nodes that a message names


@dataclass(frozen=True)
class Rules:
    """The same on every node of a job."""

    counts: tuple[int, ...]
    """Numbers of nodes that the job can run on, ascending."""
    settle: float = 10.0
    """Seconds without a new node after which no more are expected, at the start and while the job is running,"""
    last_call: float = 3.0
    """after a loss, where the job is waiting,"""
    longest_call: float = 60.0
    """and the longest that new ones can put it off."""
    dead_after: float = 10.0
    """A node that is silent for so many seconds is lost."""

    def __post_init__(self) -> None:
        if not self.counts or list(self.counts) != sorted(set(self.counts)) or self.counts[0] < 1:
            raise UsageError(f"numbers of nodes must be ascending and positive, not {self.counts}")

    @property
    def most(self) -> int:
        return self.counts[-1]

    def usable(self, nodes: int) -> int:
        """How many of so many nodes the job runs on."""
        return max((count for count in self.counts if count <= nodes), default=0)


@dataclass
class Node:
    id: str
    name: str
    address: str
    """By which the other nodes reach it."""
    pid: int
    procs: int = 1
    """Ranks that it runs."""
    heard: float = 0.0
    waits_since: float | None = None
    port: int = 0
    """Free on that node, for the store of the ranks if the first rank comes to run there."""

    @property
    def order(self) -> tuple[Any, ...]:
        """The same after a restart: ranks find the states that they have in memory."""
        try:
            number = ip_address(self.address)
            return (number.version, int(number), self.name, self.pid, self.id)
        except ValueError:
            return (0, 0, f"{self.address} {self.name}", self.pid, self.id)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Seat:
    """What a member of a round is told."""

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
class Status:
    """What every node is told when it changes."""

    running: int = 0
    """Nodes in the present round."""
    change: bool = False
    """Members are to save, and come back for a larger round or without one that has left."""
    lost: tuple[str, ...] = ()
    """Members that are gone or have failed: what their peers wait for will not come."""
    closed: Outcome | None = None


@dataclass
class Rounds:
    """
    >>> rounds = Rounds(Rules((2,)))
    >>> for name in "ab":
    ...     rounds.enter(Node(name, name, f"10.0.0.{ord(name)}", pid=1), now=0.0)
    ...     rounds.wait(name, port=4000, now=0.0)
    >>> {name: seat.rank for name, seat in rounds.step(now=0.1).items()}
    {'a': 0, 'b': 1}
    """

    rules: Rules
    nodes: dict[str, Node] = field(default_factory=dict)
    number: int = 0
    closed: Outcome | None = None
    _members: list[str] = field(default_factory=list)
    """Of the present round, or the one before while none is."""
    _inside: set[str] = field(default_factory=set)
    """Those that are still in it."""
    _lost: list[str] = field(default_factory=list)
    _changing: bool = False
    """Members were told to come back, or one has left."""
    _newest: float = 0.0
    """When a node last came to wait."""
    _enough_since: float | None = None
    _stepped: float | None = None
    _failed_at: dict[int, set[str]] = field(default_factory=dict)

    def enter(self, node: Node, now: float) -> None:
        node.heard = now
        self.nodes[node.id] = node

    def hear(self, id: str, now: float) -> None:
        if id in self.nodes:
            self.nodes[id].heard = now

    def wait(self, id: str, port: int, now: float, failed: bool = False) -> None:
        """A node wants to be in the next round. ``failed``: its ranks in the present one have."""
        node = self.nodes[id]
        node.waits_since, node.port, node.heard, self._newest = now, port, now, now
        if id in self._inside:
            self._inside.discard(id)
            self._changing = True
            if failed:
                self._lost.append(str(node))

    def leave(self, id: str, politely: bool) -> None:
        """``politely``: its ranks have saved and ended. Otherwise it is lost."""
        node = self.nodes.pop(id, None)
        if node is None or id not in self._inside:
            return
        self._inside.discard(id)
        self._changing = True
        if not politely:
            self._lost.append(str(node))

    def close(self, outcome: Outcome) -> None:
        self.closed = self.closed or outcome

    def fail(self, id: str, step: int) -> tuple[int, bool]:
        """A node fails at a step again and again: on how many nodes the job could run without it, and whether others
        have failed there as well."""
        others = self._failed_at.setdefault(step, set()) - {id}
        self._failed_at[step].add(id)
        return self.rules.usable(len(self.nodes.keys() - {id} - others)), bool(others)

    def step(self, now: float) -> dict[str, Seat]:
        """Let time pass: the silent are lost, and a round forms if it can; the seats of its members."""
        if self._stepped is not None and now - self._stepped > self.rules.dead_after / 2:
            for node in self.nodes.values():  # we ourselves were asleep, and heard nobody
                node.heard = now
        self._stepped = now
        for id in [id for id, node in self.nodes.items() if now - node.heard > self.rules.dead_after]:
            self.leave(id, politely=False)
        self._changing = self._changing or self._can_grow(now)
        return {} if self.closed is not None or self._inside else self._form(now)

    def status(self) -> Status:
        lost = (*self._lost[:SHOWN], *([f"{len(self._lost) - SHOWN} more"] if len(self._lost) > SHOWN else []))
        return Status(len(self._inside), bool(self._inside) and self._changing, lost, self.closed)

    def _waiting(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.waits_since is not None]

    def _can_grow(self, now: float) -> bool:
        waiting = self._waiting()
        if not self._inside or not waiting:
            return False
        if self.rules.usable(len(self._inside) + len(waiting)) <= len(self._members):
            return False
        first = min(node.waits_since or now for node in waiting)
        full = len(self._inside) + len(waiting) >= self.rules.most
        return full or self._settled(now, first, self.rules.settle)

    def _settled(self, now: float, since: float, call: float) -> bool:
        return now - self._newest >= call or now - since >= self.rules.longest_call

    def _form(self, now: float) -> dict[str, Seat]:
        waiting = self._waiting()
        size = self.rules.usable(len(waiting))
        if size == 0:
            self._enough_since = None
            return {}
        if self._enough_since is None:
            self._enough_since = now
        again = self.number > 0
        as_large_as_before = again and size >= len(self._members)
        call = self.rules.last_call if again else self.rules.settle
        if size < self.rules.most and not as_large_as_before and not self._settled(now, self._enough_since, call):
            return {}
        before = set(self._members)
        chosen = sorted(waiting, key=lambda node: (node.id not in before, node.order))[:size]
        chosen.sort(key=lambda node: node.order)
        self.number += 1
        self._members = [node.id for node in chosen]
        self._inside, self._lost, self._changing, self._enough_since = set(self._members), [], False, None
        for node in chosen:
            node.waits_since = None
        master, ranks = chosen[0], sum(node.procs for node in chosen)
        seats, first_rank = {}, 0
        for rank, node in enumerate(chosen):
            seats[node.id] = Seat(self.number, rank, size, first_rank, ranks, master.address, master.port)
            first_rank += node.procs
        return seats


def rules_message(rules: Rules) -> dict[str, Any]:
    return asdict(rules)


def read_rules(message: dict[str, Any]) -> Rules:
    return Rules(**{**message, "counts": tuple(message["counts"])})
