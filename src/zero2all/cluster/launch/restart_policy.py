"""Whether a failed job is restarted, and without which nodes: pure decisions.

A node that is excluded leaves the job and is listed. It does not come back by itself, but only with
``z2a launch --readmit``. The list is kept by the rendezvous, by host name and address.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from zero2all.base.environment import NOTIFY_VARIABLE
from zero2all.cluster.launch.exit_reason import FailureKind

MAX_FAILURES_PER_STEP = 3  # failures at one step before the job is given up
MAX_FAILURES_WITHOUT_PROGRESS = 10  # failures in a row without progress, at any step
MAX_BACKOFF = 60.0


class RestartPolicy:
    """Counts failures by step, and decides on restarts."""

    def __init__(self, *, sees_progress: bool = True) -> None:
        """``sees_progress`` is False for a script: as long as it sends no heartbeat, only the number of restarts
        limits them."""
        self._sees_progress = sees_progress
        self._failures_by_step: Counter[int] = Counter()
        self._failures_without_progress = 0
        self._furthest = -1

    def record_progress(self, step: int) -> None:
        """Progress resets the counters."""
        if step > self._furthest:
            self._furthest, self._failures_without_progress = step, 0
            self._failures_by_step.clear()

    def reason_to_give_up(self, kind: FailureKind, step: int, nodes: int | None, restarts_left: int) -> str | None:
        """Count a failure; the reason not to restart, if there is one."""
        if kind == "wrong usage":
            return "not tried again: it would fail the same way"
        if kind == "stopped":
            # With several nodes another one may be leaving; those that stay continue.
            return None if (nodes or 1) > 1 else "stopped: the same command resumes from there"
        if kind != "cut off" or (nodes or 1) == 1:  # otherwise another node failed at this step, not this one
            self._failures_by_step[step] += 1
        self._failures_without_progress += 1
        where = f"after step {step}" if step >= 0 else "before the first step"
        if not self._sees_progress and self._furthest < 0:
            return None if restarts_left else "given up: no restarts are left (--max-restarts)"
        if self._failures_by_step[step] >= MAX_FAILURES_PER_STEP:
            return f"given up: it failed {MAX_FAILURES_PER_STEP} times {where}, so a restart would too"
        if self._failures_without_progress >= MAX_FAILURES_WITHOUT_PROGRESS:
            failures = f"{MAX_FAILURES_WITHOUT_PROGRESS} failures in a row"
            return f"given up: {failures} without getting past step {self._furthest}"
        return None if restarts_left else f"given up {where}: no restarts are left (--max-restarts)"

    def backoff(self) -> float:
        """Seconds before the next restart: none at first, then exponential without progress."""
        return (
            0.0
            if self._failures_without_progress < 2
            else min(MAX_BACKOFF, 2.0 ** (self._failures_without_progress - 1))
        )


FAILURE_WINDOW = 10  # failures of the job that are remembered
MIN_OWN_FAILURES = 3
CHANCE = 0.01  # largest probability that failures at random would hit the same node that often in a row
OWN_KINDS: tuple[FailureKind, ...] = ("crash", "out of memory", "wrong usage")  # others may follow from another node
SUSPICIOUS_KINDS: tuple[FailureKind, ...] = ("hang", "cut off")  # a node may be the cause, and which one is unknown

ExclusionRule = Literal["failures", "GPU", "pair test", "straggler"]
NodeKey = tuple[str, str]  # host name and address
READMIT_ADVICE = "check it with 'z2a doctor', then start it there with 'z2a launch --readmit'"


@dataclass(frozen=True)
class ExcludedNode:
    name: str
    address: str
    rule: ExclusionRule
    reason: str
    step: int | None = None
    """The step at which it failed repeatedly, for the rule ``failures``."""

    @property
    def key(self) -> NodeKey:
        return (self.name, self.address)

    def __str__(self) -> str:
        return f"{self.name} ({self.address}): {self.reason}"


@dataclass(frozen=True)
class FailureFacts:
    """What a node reports about the failure of a round."""

    step: int
    kind: FailureKind
    by_signal: bool = False
    """Whether a signal ended a rank, as opposed to an exception of the program."""
    gives_up: bool = False
    """Whether the node itself would not restart."""
    gpu_faults: tuple[str, ...] = ()
    """The fatal faults of its GPUs."""

    @property
    def is_own(self) -> bool:
        """Whether the cause is on this node."""
        return self.kind in OWN_KINDS


@dataclass
class FailedRound:
    number: int
    facts: dict[NodeKey, FailureFacts] = field(default_factory=dict)
    node_left: bool = False
    """A node was lost or told to leave, which explains what the others report."""

    def culprit(self) -> NodeKey | None:
        """The only node with a failure of its own; None if there are several."""
        own = [key for key, facts in self.facts.items() if facts.is_own]
        return own[0] if len(own) == 1 else None

    def suspects_nodes(self) -> bool:
        """Whether a node may be the cause without anybody knowing which: neither an exception explains the failure,
        nor a node that has left."""
        explained = any(
            facts.kind == "stopped" or (facts.is_own and not facts.by_signal) for facts in self.facts.values()
        )
        suspicious = any(facts.by_signal or facts.kind in SUSPICIOUS_KINDS for facts in self.facts.values())
        return suspicious and not explained and not self.node_left


def failures_to_exclude(nodes: int) -> int:
    """How many failures in a row, on one of that many nodes, are so rare by chance that the node is the cause.

    >>> [failures_to_exclude(nodes) for nodes in (2, 3, 4, 8, 16, 1000)]
    [8, 6, 5, 4, 3, 3]
    """
    count = MIN_OWN_FAILURES
    while nodes > 1 and nodes ** (1 - count) >= CHANCE:
        count += 1
    return count


class FailureHistory:
    """The job's last failures, by round, and which node each was of."""

    def __init__(self) -> None:
        self.rounds: deque[FailedRound] = deque(maxlen=FAILURE_WINDOW)
        self._failed_at: dict[int, set[NodeKey]] = {}

    def record(self, round_number: int, node: NodeKey, facts: FailureFacts) -> None:
        self.of_round(round_number).facts[node] = facts
        if facts.is_own:
            self._failed_at.setdefault(facts.step, set()).add(node)

    def of_round(self, number: int) -> FailedRound:
        if not self.rounds or self.rounds[-1].number != number:
            self.rounds.append(FailedRound(number))
        return self.rounds[-1]

    def others_failed_at(self, step: int, node: NodeKey) -> set[NodeKey]:
        return self._failed_at.get(step, set()) - {node}

    def forget(self, node: NodeKey) -> None:
        """It is readmitted: what it did before does not count."""
        for found in self.rounds:
            found.facts.pop(node, None)
        for failed in self._failed_at.values():
            failed.discard(node)

    def own_failures_in_a_row(self, node: NodeKey) -> int:
        """The job's latest failures that were of this node alone; those without a known culprit do not count."""
        count = 0
        for found in reversed(self.rounds):
            if not any(facts.is_own for facts in found.facts.values()):
                continue
            if found.culprit() != node:
                break
            count += 1
        return count

    def reason_to_exclude(self, node: NodeKey, nodes: int, facts: FailureFacts) -> tuple[ExclusionRule, str] | None:
        """The rule and the reason, by the failure that this node has just reported, in a round of ``nodes`` nodes."""
        if facts.kind == "stopped":
            return None
        if facts.gpu_faults:
            return "GPU", f"hardware error: {'; '.join(facts.gpu_faults[:3])}"
        if not facts.is_own:
            return None
        if facts.gives_up:
            return None if self.others_failed_at(facts.step, node) else ("failures", _repeated(facts))
        count = self.own_failures_in_a_row(node)
        if nodes > 1 and count >= failures_to_exclude(nodes):
            return "failures", f"the last {count} failures of the job were of its ranks, and none of other nodes"
        return None


def _repeated(facts: FailureFacts) -> str:
    where = f"after step {facts.step}" if facts.step >= 0 else "before the first step"
    return f"only its ranks fail {where} ({facts.kind})"


StragglerPolicy = Literal["warn", "exclude"]


@dataclass(frozen=True)
class NodePolicy:
    readmit: bool = False
    """This node comes back although it was excluded."""
    stragglers: StragglerPolicy = "warn"
    """What is done about a node that all others wait for."""
    notify: str | None = None
    """A command that gets every event of the job as JSON on its stdin, or a URL to which it is posted."""

    def arguments(self) -> list[str]:
        """The options that differ from their defaults, as words of a command line."""
        found = ["--readmit"] if self.readmit else []
        if self.stragglers != NodePolicy.stragglers:
            found += ["--stragglers", self.stragglers]
        if self.notify is not None and self.notify != os.environ.get(NOTIFY_VARIABLE):
            found += ["--notify", self.notify]
        return found
