"""Membership of a job: the decisions of the rendezvous, without sockets, threads or clocks of its own.

Nodes register, and wait for a round. A round forms when enough of them wait and no more are expected; each member gets
its rank, in order of addresses. When a member is lost or has failed, the others are notified, return and wait for
the next round. Times are of the rendezvous's own monotonic clock: those of the nodes do not matter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from zero2all.elastic.notify import JobEvent
from zero2all.elastic.pair_test import NextTurn, PairTest, TurnReport
from zero2all.elastic.restart_policy import (
    ExcludedNode,
    ExclusionRule,
    FailureFacts,
    FailureHistory,
    NodeKey,
    StragglerPolicy,
)
from zero2all.elastic.stragglers import CHECKS_TO_CONFIRM, ArrivalReport, StragglerWatch
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
    node_test: bool = True
    """Whether nodes are tested before they restart after a failure that one of them may have caused."""
    stragglers: StragglerPolicy = "warn"
    """What is done about a node that all others wait for."""

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

    @property
    def key(self) -> NodeKey:
        """The same after the agent of a node was started again."""
        return (self.name, self.address)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class FailureAnswer:
    """What the rendezvous decides about a node that has reported a failure."""

    excluded: str | None = None
    """Why it must leave the job, if so."""
    kept: str | None = None
    """Why it stays although a rule says that it is bad, if so."""


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
    events: tuple[JobEvent, ...] = ()
    """Since the previous round; only for the first node, which reports them."""
    node_test: bool = False
    """Whether the nodes are tested before their ranks start."""


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
    spares: int = 0
    """Nodes that wait while the job is running: it cannot use them, or not yet."""
    excluded: tuple[ExcludedNode, ...] = ()


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
    excluded: dict[NodeKey, ExcludedNode] = field(default_factory=dict)
    """Nodes that may not come back by themselves."""
    history: FailureHistory = field(default_factory=FailureHistory)
    _excluded_ids: dict[str, ExcludedNode] = field(default_factory=dict)
    """Of those that are still connected."""
    _excluded_in: int = 0
    """The latest round in which a node was excluded: one failure costs one node at most."""
    _readmitted: set[NodeKey] = field(default_factory=set)
    _stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    _test: PairTest | None = None
    """Of the current round."""
    _events: list[JobEvent] = field(default_factory=list)
    """Since the round formed."""
    _spares: int = 0
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

    def register(self, node: Node, now: float) -> None:
        node.last_heard = now
        self.nodes[node.id] = node

    def record_heartbeat(self, id: str, now: float) -> None:
        if id in self.nodes:
            self.nodes[id].last_heard = now

    def join_next_round(self, id: str, port: int, now: float, failed: bool = False) -> None:
        """A node joins the next round. ``failed``: its ranks failed in the current one."""
        if id in self._excluded_ids:
            self.leave(id, gracefully=not failed)
            return
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
        self._excluded_ids.pop(id, None)
        if node is None or id not in self._active:
            return
        self._active.discard(id)
        self._membership_changing = True
        self.history.of_round(self.round_number).node_left = True
        if not gracefully:
            self._lost.append(str(node))
            self._events.append(JobEvent("node lost", f"{node} is lost", str(node)))

    def close(self, outcome: Outcome) -> None:
        self.closed = self.closed or outcome

    def exclusion(self, id: str) -> ExcludedNode | None:
        return self._excluded_ids.get(id)

    def exclude(self, id: str, rule: ExclusionRule, reason: str, failed: bool, step: int | None = None) -> str | None:
        """The node leaves the job: at once if it has ``failed``, else once its ranks have saved. Returns why it must
        not, if so: the job could not run without it, or the same round has cost a node already."""
        node = self.nodes[id]
        others = [other for other in self.nodes if other not in self._excluded_ids and other != id]
        if self._excluded_in == self.round_number:
            return "another node was excluded for the same failure"
        if not self.settings.usable_nodes(len(others)):
            return f"the others are {len(others)}, and the job needs {self.settings.counts[0]}: start a spare node"
        entry = self.excluded[node.key] = ExcludedNode(node.name, node.address, rule, reason, step)
        self._excluded_in = self.round_number
        self._events.append(JobEvent("node excluded", f"{node} is excluded: {reason}", str(node)))
        self._mark_excluded(node, entry)
        if failed and id in self._active:
            self._active.discard(id)
            self._lost.append(str(node))
        return None

    def _mark_excluded(self, node: Node, entry: ExcludedNode) -> None:
        self._excluded_ids[node.id], node.waiting_since = entry, None
        self._membership_changing = self._membership_changing or node.id in self._active

    def learn_exclusions(self, entries: Iterable[ExcludedNode]) -> None:
        """From a node that was in the job before this rendezvous was started again, and has forgotten them."""
        for entry in entries:
            if entry.key not in self._readmitted and entry.key not in self.excluded:
                self.excluded[entry.key] = entry
                for node in self.nodes.values():
                    if node.key == entry.key:
                        self._mark_excluded(node, entry)

    def readmit(self, key: NodeKey) -> ExcludedNode | None:
        """Because a person says so."""
        self._readmitted.add(key)
        self.history.forget(key)
        return self.excluded.pop(key, None)

    def report_failure(self, id: str, facts: FailureFacts) -> FailureAnswer:
        """The ranks of a node have failed, or were cut off by a failure elsewhere."""
        node = self.nodes[id]
        self.history.record(self.round_number, node.key, facts)
        others = self.history.others_failed_at(facts.step, node.key)
        if facts.is_own and facts.gives_up:  # then the step is bad, not the nodes that left because of it
            for key in others:
                if (entry := self.excluded.get(key)) is not None and entry.step == facts.step:
                    del self.excluded[key]
        found = self.history.reason_to_exclude(node.key, len(self._members), facts)
        if found is None:
            return FailureAnswer()
        rule, reason = found
        kept = self.exclude(id, rule, reason, failed=True, step=facts.step if rule == "failures" else None)
        return FailureAnswer(excluded=reason) if kept is None else FailureAnswer(kept=f"{reason}; not excluded: {kept}")

    def report_arrivals(self, id: str, report: ArrivalReport) -> str | None:
        """A warning, if this report completes a check in which a node is slow."""
        if id not in self._active or len(self._active) < 2:
            return None
        found = self._stragglers.report(id, report, self._active)
        if found is None:
            return None
        node = self.nodes[found.node]
        warning = f"{node} is slow: the others wait for it {100 * found.share:.0f}% of the time"
        if not found.confirmed or self.settings.stragglers != "exclude":
            return warning
        kept = self.exclude(found.node, "straggler", f"slow in {CHECKS_TO_CONFIRM} checks in a row", failed=False)
        return warning + ("; it is excluded" if kept is None else f"; not excluded: {kept}")

    def report_test_turn(self, id: str, report: TurnReport) -> None:
        if self._test is not None and id in self._test.members:
            self._test.report(id, report)

    def next_test_turn(self, id: str, after: int) -> NextTurn | None:
        """None while other nodes have not reported this turn."""
        if self._test is None or id not in self._test.members:
            return NextTurn(after + 1, done=True, again=True)  # the round is over
        return self._test.next_turn(id, after)

    def _advance_test(self, now: float) -> None:
        test = self._test
        if test is None or test.done:
            return
        if self._lost or self._membership_changing or self.closed is not None:
            test.abort()
        elif test.advance(now) and test.done:
            self._judge_test(test)

    def _judge_test(self, test: PairTest) -> None:
        """One bad node at most is excluded: if there are more, the next failure tests again."""
        for id, reason in test.bad_members().items():
            node = self.nodes[id]
            kept = self.exclude(id, "pair test", f"it fails the node test: {reason}", failed=False)
            test.finding = f"{node} fails the node test: {reason}" + ("" if kept is None else f"; not excluded: {kept}")
            test.again = kept is None
            return

    def _should_test(self, size: int) -> bool:
        """After the round that has just ended: whether one of the nodes may be bad, and none is known to be."""
        failed = self.history.rounds[-1] if self.history.rounds else None
        return (
            self.settings.node_test
            and size > 1
            and failed is not None
            and failed.number == self.round_number != self._excluded_in
            and failed.suspects_nodes()
        )

    def advance(self, now: float) -> dict[str, RankAssignment]:
        """Mark silent nodes as lost, and form a round if possible; returns the assignments of its members."""
        if self._last_advance is not None and now - self._last_advance > self.settings.dead_after / 2:
            for node in self.nodes.values():  # this process was suspended, and received nothing
                node.last_heard = now
        self._last_advance = now
        for id in [id for id, node in self.nodes.items() if now - node.last_heard > self.settings.dead_after]:
            self.leave(id, gracefully=False)
        self._membership_changing = self._membership_changing or self._can_grow(now)
        if now - self._last_arrival >= self.settings.settle:  # not at every arrival: all nodes get the status
            self._spares = len(self._waiting())
        self._advance_test(now)
        return {} if self.closed is not None or self._active else self._form_round(now)

    def status(self) -> RendezvousStatus:
        return RendezvousStatus(
            running=len(self._members) if self._active else 0,
            change=bool(self._active) and self._membership_changing,
            lost=tuple(self._lost[:MAX_LOST_SHOWN]) + ("others",) * (len(self._lost) > MAX_LOST_SHOWN),
            closed=self.closed,
            spares=self._spares if self._active else 0,
            excluded=tuple(self.excluded.values()),
        )

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
        chosen = self._assign_places(waiting, size)
        events, tested = self._round_events(chosen), self._should_test(size)
        self.round_number += 1
        self._formed = now
        self._members = [node.id for node in chosen]
        self._active, self._lost, self._membership_changing, self._enough_since = set(self._members), [], False, None
        for node in chosen:
            node.waiting_since = None
        self._events, self._spares = [], len(self._waiting())
        self._test, self._stragglers = PairTest(self._members, now) if tested else None, StragglerWatch()
        master, ranks = chosen[0], sum(node.procs for node in chosen)
        assignments, first_rank = {}, 0
        for rank, node in enumerate(chosen):
            assignments[node.id] = RankAssignment(
                self.round_number, rank, size, first_rank, ranks, master.address, master.port,
                () if rank else events, tested,
            )  # fmt: skip
            first_rank += node.procs
        return assignments

    def _assign_places(self, waiting: list[Node], size: int) -> list[Node]:
        """Members of the previous round first, then spares; by address. If as many nodes run as before, members keep
        their ranks, and with them their checkpoints in memory: a spare gets the place of the node that is gone."""
        before = set(self._members)
        chosen = sorted(waiting, key=lambda node: (node.id not in before, node.sort_key))[:size]
        if size != len(self._members):
            return sorted(chosen, key=lambda node: node.sort_key)
        stayed = {node.id: node for node in chosen if node.id in before}
        spares = (node for node in chosen if node.id not in before)
        return [stayed[id] if id in stayed else next(spares) for id in self._members]

    def _round_events(self, chosen: list[Node]) -> tuple[JobEvent, ...]:
        """What the first node of the new round reports, before the state of the previous one is dropped."""
        if self.round_number == 0:
            return ()
        events, before = list(self._events), set(self._members)
        if before - {node.id for node in chosen}:
            new = [node for node in chosen if node.id not in before]
            events += [JobEvent("spare taken in", f"spare {node} is taken in", str(node)) for node in new]
        if self._lost:
            after = ", ".join(self.status().lost)
            nodes = f"{len(chosen)} node{'s' * (len(chosen) != 1)}"
            events.append(JobEvent("job restarted", f"the job restarts on {nodes} after a failure of {after}"))
        return tuple(events)
