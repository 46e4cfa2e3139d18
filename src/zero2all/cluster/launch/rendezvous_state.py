"""The decisions of the rendezvous about the nodes of a job, without sockets, threads or clocks of its own.

Nodes register, and wait for a round. A round forms when enough of them wait and no more are expected; each member gets
its rank, in order of addresses. When a member is lost or has failed, the others are notified, return and wait for
the next round. Times are of the rendezvous's own monotonic clock: the clocks of the nodes do not matter.
"""

from __future__ import annotations

from zero2all.cluster.launch.membership import Membership, Node
from zero2all.cluster.launch.node_exclusion import NodeExclusions, NodeTests
from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.rendezvous_messages import Outcome, RankAssignment, RendezvousSettings, RendezvousStatus
from zero2all.cluster.launch.restart_policy import ExcludedNode, NodeKey


class RendezvousState:
    """
    >>> state = RendezvousState(RendezvousSettings((2,)))
    >>> for name in "ab":
    ...     state.register(Node(name, name, f"10.0.0.{ord(name)}", pid=1), now=0.0)
    ...     state.join_next_round(name, port=4000, now=0.0)
    >>> {name: assignment.rank for name, assignment in state.advance(now=0.1).items()}
    {'a': 0, 'b': 1}
    """

    def __init__(self, settings: RendezvousSettings, excluded: dict[NodeKey, ExcludedNode] | None = None) -> None:
        self.membership = Membership(settings)
        self.exclusions = NodeExclusions(self.membership, excluded)
        self.tests = NodeTests(self.membership, self.exclusions)
        self.closed: Outcome | None = None
        self._spares = 0
        self._last_arrival = 0.0
        """When a node last began to wait."""
        self._enough_since: float | None = None
        self._formed = 0.0
        """When the current round began."""
        self._last_advance: float | None = None

    def register(self, node: Node, now: float) -> None:
        node.last_heard = now
        self.membership.nodes[node.id] = node

    def record_heartbeat(self, id: str, now: float) -> None:
        if id in self.membership.nodes:
            self.membership.nodes[id].last_heard = now

    def join_next_round(self, id: str, port: int, now: float, *, failed: bool = False) -> None:
        """A node joins the next round. ``failed``: its ranks failed in the current one."""
        if self.exclusions.of(id) is not None:
            self.leave(id, gracefully=not failed)
            return
        node = self.membership.nodes[id]
        node.waiting_since, node.port, node.last_heard, self._last_arrival = now, port, now, now
        if id in self.membership.active:
            self.membership.is_changing = True
            self.membership.drop(node, is_lost=failed)

    def leave(self, id: str, *, gracefully: bool) -> None:
        """``gracefully``: its ranks have saved and exited. Otherwise it is lost."""
        membership = self.membership
        node = membership.nodes.pop(id, None)
        self.exclusions.disconnect(id)
        if node is None or id not in membership.active:
            return
        membership.is_changing = True
        self.exclusions.history.of_round(membership.round_number).node_left = True
        membership.drop(node, is_lost=not gracefully)
        if not gracefully:
            membership.events.append(JobEvent("node lost", f"{node} is lost", str(node)))

    def close(self, outcome: Outcome) -> None:
        self.closed = self.closed or outcome

    def advance(self, now: float) -> dict[str, RankAssignment]:
        """Mark silent nodes as lost, and form a round if possible; returns the assignments of its members."""
        membership = self.membership
        dead_after = membership.settings.dead_after
        if self._last_advance is not None and now - self._last_advance > dead_after / 2:
            for node in membership.nodes.values():  # this process was suspended, and received nothing
                node.last_heard = now
        self._last_advance = now
        for id in [id for id, node in membership.nodes.items() if now - node.last_heard > dead_after]:
            self.leave(id, gracefully=False)
        membership.is_changing = membership.is_changing or self._can_grow(now)
        if now - self._last_arrival >= membership.settings.settle:  # not at every arrival: all nodes get the status
            self._spares = len(membership.waiting())
        self.tests.advance(now, is_closed=self.closed is not None)
        return {} if self.closed is not None or membership.active else self._form_round(now)

    def status(self) -> RendezvousStatus:
        is_running = bool(self.membership.active)
        return RendezvousStatus(
            running=len(self.membership.members) if is_running else 0,
            change=is_running and self.membership.is_changing,
            lost=self.membership.lost_names(),
            closed=self.closed,
            spares=self._spares if is_running else 0,
            excluded=tuple(self.exclusions.entries.values()),
        )

    def _can_grow(self, now: float) -> bool:
        membership, settings = self.membership, self.membership.settings
        waiting, active = membership.waiting(), len(membership.active)
        if not active or not waiting:
            return False
        if settings.usable_nodes(active + len(waiting)) <= len(membership.members):
            return False
        if active + len(waiting) >= settings.max_nodes:
            return True
        if now - self._formed < settings.longest_call:
            return False
        first = min(node.waiting_since or now for node in waiting)
        return self._settled(now, first, settings.settle)

    def _settled(self, now: float, since: float, quiet_period: float) -> bool:
        return now - self._last_arrival >= quiet_period or now - since >= self.membership.settings.longest_call

    def _form_round(self, now: float) -> dict[str, RankAssignment]:
        membership, settings = self.membership, self.membership.settings
        size = settings.usable_nodes(len(membership.waiting()))
        if size == 0:
            self._enough_since = None
            return {}
        if self._enough_since is None:
            self._enough_since = now
        again = membership.round_number > 0
        as_large_as_before = again and size >= len(membership.members)
        quiet_period = settings.last_call if again else settings.settle
        if (
            size < settings.max_nodes
            and not as_large_as_before
            and not self._settled(now, self._enough_since, quiet_period)
        ):
            return {}
        chosen = membership.assign_places(size)
        events, is_tested = membership.round_events(chosen), self.tests.is_due(size)
        membership.begin_round(chosen)
        self._formed, self._enough_since, self._spares = now, None, len(membership.waiting())
        self.exclusions.begin_round()
        self.tests.begin_round(is_tested=is_tested, now=now)
        return _assign_ranks(chosen, membership.round_number, events, is_tested=is_tested)


def _assign_ranks(
    chosen: list[Node], round_number: int, events: tuple[JobEvent, ...], *, is_tested: bool
) -> dict[str, RankAssignment]:
    master, ranks = chosen[0], sum(node.procs for node in chosen)
    assignments, first_rank = {}, 0
    for rank, node in enumerate(chosen):
        assignments[node.id] = RankAssignment(
            round_number,
            rank,
            len(chosen),
            first_rank,
            ranks,
            master.address,
            master.port,
            () if rank else events,
            is_tested,
        )
        first_rank += node.procs
    return assignments
