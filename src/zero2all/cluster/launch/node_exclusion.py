"""Which nodes are bad and leave the job: by the failures that they report, as stragglers, or by the node test."""

from __future__ import annotations

from collections.abc import Iterable

from zero2all.cluster.launch.membership import Membership, Node
from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.pair_check import NextTurn, PairTest, TurnReport
from zero2all.cluster.launch.rendezvous_messages import FailureAnswer
from zero2all.cluster.launch.restart_policy import ExcludedNode, ExclusionRule, FailureFacts, FailureHistory, NodeKey
from zero2all.cluster.launch.stragglers import CHECKS_TO_CONFIRM, ArrivalReport, StragglerWatch


class NodeExclusions:
    """
    >>> exclusions = NodeExclusions(membership)
    >>> exclusions.report_failure("a", FailureFacts(step=7, kind="crash", gives_up=True)).excluded
    'only its ranks fail after step 7 (crash)'
    """

    def __init__(self, membership: Membership, entries: dict[NodeKey, ExcludedNode] | None = None) -> None:
        self.entries: dict[NodeKey, ExcludedNode] = {} if entries is None else entries
        """Nodes that may not come back by themselves."""
        self.history = FailureHistory()
        self.latest_round = 0
        """The latest round in which a node was excluded: one failure costs one node at most."""
        self._membership = membership
        self._connected: dict[str, ExcludedNode] = {}
        """Excluded nodes that are still connected, by their id."""
        self._readmitted: set[NodeKey] = set()
        self._stragglers = StragglerWatch()

    def of(self, id: str) -> ExcludedNode | None:
        return self._connected.get(id)

    def begin_round(self) -> None:
        self._stragglers = StragglerWatch()

    def disconnect(self, id: str) -> None:
        self._connected.pop(id, None)

    def exclude(
        self, id: str, rule: ExclusionRule, reason: str, *, failed: bool, step: int | None = None
    ) -> str | None:
        """The node leaves the job: at once if it has ``failed``, else once its ranks have saved. Returns why it must
        not, if so: the job could not run without it, or the same round has cost a node already."""
        membership, node = self._membership, self._membership.nodes[id]
        others = [other for other in membership.nodes if other not in self._connected and other != id]
        if self.latest_round == membership.round_number:
            return "another node was excluded for the same failure"
        if not membership.settings.usable_nodes(len(others)):
            needed = membership.settings.counts[0]
            return f"the others are {len(others)}, and the job needs {needed}: start a spare node"
        entry = self.entries[node.key] = ExcludedNode(node.name, node.address, rule, reason, step)
        self.latest_round = membership.round_number
        membership.events.append(JobEvent("node excluded", f"{node} is excluded: {reason}", str(node)))
        self._mark(node, entry)
        if failed and id in membership.active:
            membership.drop(node, is_lost=True)
        return None

    def _mark(self, node: Node, entry: ExcludedNode) -> None:
        self._connected[node.id], node.waiting_since = entry, None
        self._membership.is_changing = self._membership.is_changing or node.id in self._membership.active

    def learn(self, entries: Iterable[ExcludedNode]) -> None:
        """A node was in the job before this rendezvous was started again, which has forgotten the entries."""
        for entry in entries:
            if entry.key not in self._readmitted and entry.key not in self.entries:
                self.entries[entry.key] = entry
                for node in self._membership.nodes.values():
                    if node.key == entry.key:
                        self._mark(node, entry)

    def readmit(self, key: NodeKey) -> ExcludedNode | None:
        """A person has asked for it."""
        self._readmitted.add(key)
        self.history.forget(key)
        return self.entries.pop(key, None)

    def report_failure(self, id: str, facts: FailureFacts) -> FailureAnswer:
        """The ranks of a node have failed, or were cut off by a failure elsewhere."""
        node = self._membership.nodes[id]
        self.history.record(self._membership.round_number, node.key, facts)
        others = self.history.others_failed_at(facts.step, node.key)
        if facts.is_own and facts.gives_up:  # then the step is bad, not the nodes that left because of it
            for key in others:
                if (entry := self.entries.get(key)) is not None and entry.step == facts.step:
                    del self.entries[key]
        found = self.history.reason_to_exclude(node.key, len(self._membership.members), facts)
        if found is None:
            return FailureAnswer()
        rule, reason = found
        kept = self.exclude(id, rule, reason, failed=True, step=facts.step if rule == "failures" else None)
        return FailureAnswer(excluded=reason) if kept is None else FailureAnswer(kept=f"{reason}; not excluded: {kept}")

    def report_arrivals(self, id: str, report: ArrivalReport) -> str | None:
        """A warning, if this report completes a check in which a node is slow."""
        active = self._membership.active
        if id not in active or len(active) < 2:
            return None
        found = self._stragglers.report(id, report, active)
        if found is None:
            return None
        node = self._membership.nodes[found.node]
        warning = f"{node} is slow: the others wait for it {100 * found.share:.0f}% of the time"
        if not found.confirmed or self._membership.settings.stragglers != "exclude":
            return warning
        kept = self.exclude(found.node, "straggler", f"slow in {CHECKS_TO_CONFIRM} checks in a row", failed=False)
        return warning + ("; it is excluded" if kept is None else f"; not excluded: {kept}")


class NodeTests:
    """The node test of the current round, if it has one.

    >>> tests.report_turn("a", TurnReport(0))
    >>> tests.next_turn("a", after=0)  # None while other nodes have not reported
    """

    def __init__(self, membership: Membership, exclusions: NodeExclusions) -> None:
        self._membership, self._exclusions = membership, exclusions
        self._test: PairTest | None = None

    def is_due(self, size: int) -> bool:
        """Whether one of the nodes may be bad, by the round that has just ended, and none is known to be."""
        rounds, number = self._exclusions.history.rounds, self._membership.round_number
        failed = rounds[-1] if rounds else None
        return (
            self._membership.settings.node_test
            and size > 1
            and failed is not None
            and failed.number == number != self._exclusions.latest_round
            and failed.suspects_nodes()
        )

    def begin_round(self, *, is_tested: bool, now: float) -> None:
        self._test = PairTest(self._membership.members, now) if is_tested else None

    def report_turn(self, id: str, report: TurnReport) -> None:
        if self._test is not None and id in self._test.members:
            self._test.report(id, report)

    def next_turn(self, id: str, after: int) -> NextTurn | None:
        """The turn after ``after``; None while other nodes have not reported."""
        if self._test is None or id not in self._test.members:
            return NextTurn(after + 1, done=True, again=True)  # the round is over
        return self._test.next_turn(id, after)

    def advance(self, now: float, *, is_closed: bool) -> None:
        test = self._test
        if test is None or test.done:
            return
        if self._membership.lost or self._membership.is_changing or is_closed:
            test.abort()
        elif test.advance(now) and test.done:
            self._judge(test)

    def _judge(self, test: PairTest) -> None:
        """One bad node at most is excluded: if there are more, the next failure tests again."""
        for id, reason in test.bad_members().items():
            node = self._membership.nodes[id]
            kept = self._exclusions.exclude(id, "pair test", f"it fails the node test: {reason}", failed=False)
            test.finding = f"{node} fails the node test: {reason}" + ("" if kept is None else f"; not excluded: {kept}")
            test.again = kept is None
            return
