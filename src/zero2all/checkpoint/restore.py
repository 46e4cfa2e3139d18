"""Decides which state a restart restores, from where, and why: one pure function over the ranks' reports.

A state is identified by its step *and* its history. A state in memory is restored only if every rank can read its
part, in the memory of its node or after copying it from another node's. It must also be on the run's lineage: a node
that was away may still hold states of a history that the others have abandoned since. The last start or rollback set
the run's lineage, which the run directory keeps (``history.json``). A durable checkpoint that descends from it extends
it. Otherwise durable storage is the fallback, and the decision gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from zero2all.base.errors import Z2aError
from zero2all.base.records import RestoreSummary
from zero2all.base.units import show_bytes
from zero2all.checkpoint.training_state import Lineage, contains_state, descends_from

StateKey = tuple[int, str]
"""Step and history."""


@dataclass(frozen=True)
class SlotReport:
    """A state of one rank in the memory of a machine."""

    rank: int
    world_size: int
    step: int
    lineage: Lineage
    layout: str
    """The same rank of the same world size can load it directly if it shards the weights the same way."""
    problem: str | None = None
    replica: bool = False
    bytes: int = 0
    fetchable: bool = True
    """False once another node has failed to copy it."""

    @property
    def history(self) -> str:
        return self.lineage[-1].history


@dataclass(frozen=True)
class RankReport:
    """The slots in the memory of a rank's machine, its own and others'. Ranks of a node report the same."""

    slots: tuple[SlotReport, ...] = ()
    layout: str = ""
    """Fingerprint of the way in which this rank shards the weights."""
    node: int | None = None
    """Number of its node; None if no other node can be reached: then it reads only what it reports."""
    free: float = math.inf
    """Free bytes for states copied from other nodes."""


@dataclass(frozen=True)
class Fetch:
    """A part that rank ``to`` copies from the node of rank ``holder``, for all ranks of its own node."""

    slot: SlotReport
    holder: int
    to: int


@dataclass(frozen=True)
class NodeMemory:
    """The states in the memory of one node."""

    number: int | None
    """Its number; None if no other node can reach it: then it has one rank, which reads only what it reports."""
    ranks: list[int]
    free: float
    states: dict[StateKey, dict[int, SlotReport]] = field(default_factory=dict)
    """The best slot of each part, by the rank that saved it."""


def group_by_node(ranks: Sequence[RankReport]) -> list[NodeMemory]:
    """The memory of every node, indexed once: every candidate is then looked up."""
    nodes: dict[int, NodeMemory] = {}
    for rank, report in enumerate(ranks):
        key = ~rank if report.node is None else report.node
        if key in nodes:  # ranks of a node report the same
            nodes[key].ranks.append(rank)
            continue
        nodes[key] = NodeMemory(report.node, [rank], report.free)
        for slot in sorted(report.slots, key=lambda slot: (slot.problem is not None, slot.replica)):
            nodes[key].states.setdefault((slot.step, slot.history), {}).setdefault(slot.rank, slot)
    return list(nodes.values())


class StateParts:
    """The parts of one state on all nodes.

    >>> parts = StateParts((990, "a1"), group_by_node(reports))
    >>> parts.read_by(node, reports)  # for each of its ranks the slots that it reads, or why it cannot
    """

    def __init__(self, state: StateKey, nodes: list[NodeMemory]) -> None:
        self._state = state
        self._remote: dict[int, list[tuple[NodeMemory, SlotReport]]] = {}  # parts that can be copied
        for node in nodes:
            for part, slot in node.states.get(state, {}).items():
                if node.number is not None and slot.problem is None and slot.fetchable:
                    self._remote.setdefault(part, []).append((node, slot))
        self._first_remote = {part: holders[0][1] for part, holders in self._remote.items()}

    def read_by(self, node: NodeMemory, ranks: Sequence[RankReport]) -> dict[int, tuple[SlotReport, ...] | str]:
        """Each rank's own slot if the layout matches, else the slots of all saved ranks, which fit any layout."""
        remote = self._first_remote if node.number is not None else {}
        local, held = node.states.get(self._state, {}), self._held(node)
        known = next(iter(local.values()), None) or next(iter(remote.values()), None)
        if known is None:
            return dict.fromkeys(node.ranks, "not held here")
        found: dict[int, tuple[SlotReport, ...] | str] = {}
        everything: tuple[SlotReport, ...] | str | None = None  # looks at the parts of all ranks, and few nodes need it
        for rank in node.ranks:
            own = held.get(rank) or remote.get(rank) or local.get(rank)
            if own is not None and own.layout == ranks[rank].layout and known.world_size == len(ranks):
                found[rank] = own.problem or (own,)
                continue
            if everything is None:
                # Its own parts, before parts on other nodes, before its damaged ones.
                everything = _all_parts({**local, **remote, **held}, known.world_size)  # one history has one world size
            found[rank] = everything
        return found

    def fetches(self, node: NodeMemory, read: dict[int, tuple[SlotReport, ...]]) -> list[Fetch]:
        """The parts that these ranks read and their node does not hold, each copied once."""
        held = self._held(node)
        missing: dict[int, tuple[SlotReport, int]] = {}
        for rank, slots in {id(slots): (rank, slots) for rank, slots in read.items()}.values():  # most read the same
            for slot in slots:
                if slot.rank not in held:
                    alone = len(slots) == 1  # by the rank that reads it; what all read, by each a share
                    missing.setdefault(slot.rank, (slot, rank if alone else node.ranks[slot.rank % len(node.ranks)]))
        fetches = []
        for part, (slot, to) in missing.items():
            holders = self._remote[part]
            ranks = holders[to % len(holders)][0].ranks  # all holders send
            fetches.append(Fetch(slot, holder=ranks[part % len(ranks)], to=to))
        return fetches

    def _held(self, node: NodeMemory) -> dict[int, SlotReport]:
        """The valid parts on a node."""
        return {part: slot for part, slot in node.states.get(self._state, {}).items() if slot.problem is None}


def _all_parts(parts: dict[int, SlotReport], world_size: int) -> tuple[SlotReport, ...] | str:
    """All parts in the order of ranks, or the reason why they are not enough."""
    if len(parts) < world_size:
        return f"{len(parts)} of the {world_size} ranks' parts are held here"
    problem = next((slot.problem for slot in parts.values() if slot.problem is not None), None)
    return problem or tuple(parts[part] for part in sorted(parts))


StorageTier = Literal["memory", "durable"]
MAX_RANKS_IN_REASON = 3  # ranks named in a reason


@dataclass(frozen=True)
class DurableReport:
    path: str
    step: int
    lineage: Lineage | None
    """Its lineage; None if it cannot be read: then ``problems`` is not empty."""
    problems: tuple[str, ...] = ()
    unreadable: bool = False
    """Storage failed to respond: the checkpoint may still be valid."""


@dataclass(frozen=True)
class RestoreChoice:
    step: int
    lineage: Lineage
    tier: StorageTier
    sources: tuple[tuple[SlotReport, ...], ...] = ()
    """The slots that each rank reads; empty for a durable checkpoint."""
    fetches: tuple[Fetch, ...] = ()
    """Parts that must be copied between nodes first."""

    @property
    def history(self) -> str:
        return self.lineage[-1].history


@dataclass(frozen=True)
class RejectedState:
    subject: str
    step: int
    history: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.subject} (history {self.history or 'unknown'}) is skipped: {self.why}"


@dataclass(frozen=True)
class RestoreDecision:
    chosen: RestoreChoice | None
    reason: str
    rejected: tuple[RejectedState, ...] = ()
    """Newer states, newest first, and why each is rejected."""


def decision_summary(decision: RestoreDecision) -> RestoreSummary:
    chosen = decision.chosen
    return RestoreSummary(
        step=None if chosen is None else chosen.step,
        history=None if chosen is None else chosen.history,
        where=None if chosen is None else chosen.tier,
        reason=decision.reason,
        rejected=[str(rejected) for rejected in decision.rejected],
    )


def decide_restore(
    ranks: Sequence[RankReport],
    durable: Sequence[DurableReport],
    run_lineage: Lineage | None,
    max_step: float = math.inf,
) -> RestoreDecision:
    """The newest valid state of at most ``max_step`` steps on the run's lineage. ``ranks`` is in rank order.

    ``run_lineage`` is from the run directory; without it the newest durable checkpoint gives the lineage. If no state
    on it is valid, the newest valid durable checkpoint of an abandoned history is better than none.

    A checkpoint that cannot be read is not skipped: resuming from an older state would abandon it for good.
    """
    run_lineage = _extend_run_lineage(run_lineage, durable)
    durable = [report for report in durable if report.step <= max_step]
    candidates: list[Candidate] = [*(state for state in _memory_candidates(ranks) if state.step <= max_step), *durable]
    nodes = group_by_node(ranks)
    rejected: list[RejectedState] = []
    for candidate in sorted(candidates, key=_newest_first):
        found = _why_abandoned(candidate, run_lineage) or _choose_or_explain(candidate, ranks, nodes)
        if isinstance(found, RestoreChoice):
            return RestoreDecision(found, _reason(found, len(ranks)), tuple(rejected))
        rejected.append(_reject(candidate, found))
    for report in sorted(durable, key=_newest_first):
        found = _choose_or_explain(report, ranks, nodes)
        if isinstance(found, RestoreChoice):
            others = tuple(state for state in rejected if state.subject != f"checkpoint {report.path}")
            why = "of an abandoned history, since no state of the current one is valid"
            return RestoreDecision(found, f"{_reason(found, len(ranks))}; {why}", others)
    return RestoreDecision(None, "no valid state: training starts from scratch", tuple(rejected))


@dataclass(frozen=True)
class _MemoryCandidate:
    step: int
    lineage: Lineage


Candidate = _MemoryCandidate | DurableReport


def _memory_candidates(ranks: Sequence[RankReport]) -> list[_MemoryCandidate]:
    """Each state once, keyed by history id: comparing the lineages of a thousand ranks is slow."""
    candidates: dict[StateKey, _MemoryCandidate] = {}
    for rank in ranks:
        for slot in rank.slots:
            candidates.setdefault((slot.step, slot.history), _MemoryCandidate(slot.step, slot.lineage))
    return list(candidates.values())


def _newest_first(candidate: Candidate) -> tuple[int, bool, int, str]:
    """Sort key: within a step, memory first, then the longer lineage. A history may save the state it began from."""
    lineage = candidate.lineage or ()
    history = lineage[-1].history if lineage else ""
    return -candidate.step, isinstance(candidate, DurableReport), -len(lineage), history


def _extend_run_lineage(run_lineage: Lineage | None, durable: Sequence[DurableReport]) -> Lineage | None:
    """A checkpoint that descends from the lineage is of a later start, whose ``history.json`` was lost."""
    for report in sorted(durable, key=_newest_first):
        if report.lineage is not None and (run_lineage is None or descends_from(report.lineage, run_lineage)):
            return report.lineage
    return run_lineage


def _why_abandoned(state: Candidate, run_lineage: Lineage | None) -> str | None:
    if run_lineage is None or state.lineage is None:
        return None
    if contains_state(run_lineage, state.step, state.lineage[-1].history) or descends_from(state.lineage, run_lineage):
        return None
    current = run_lineage[-1]
    return f"of an abandoned history; the run continued as history {current.history} from step {current.first_step}"


def _reject(candidate: Candidate, why: str) -> RejectedState:
    subject = (
        f"checkpoint {candidate.path}"
        if isinstance(candidate, DurableReport)
        else f"the state of step {candidate.step} in memory"
    )
    return RejectedState(subject, candidate.step, candidate.lineage[-1].history if candidate.lineage else None, why)


def _choose_or_explain(
    candidate: Candidate, ranks: Sequence[RankReport], nodes: list[NodeMemory]
) -> RestoreChoice | str:
    """The slots that every rank can read this state from, or the reason why a rank cannot."""
    if isinstance(candidate, DurableReport):
        if candidate.unreadable:
            raise Z2aError(
                f"checkpoint {candidate.path} cannot be read: {'; '.join(candidate.problems)}; start again once it is "
                "readable, or move it away to resume from an older state"
            )
        if candidate.problems or candidate.lineage is None:
            return "; ".join(candidate.problems) or "its lineage cannot be read"
        return RestoreChoice(candidate.step, candidate.lineage, "durable")
    parts = StateParts((candidate.step, candidate.lineage[-1].history), nodes)
    sources: list[tuple[SlotReport, ...]] = [()] * len(ranks)
    missing: list[tuple[int, str]] = []
    fetches: list[Fetch] = []
    for node in nodes:
        read = parts.read_by(node, ranks)
        missing += [(rank, found) for rank, found in read.items() if isinstance(found, str)]
        chosen = {rank: found for rank, found in read.items() if not isinstance(found, str)}
        for rank, found in chosen.items():
            sources[rank] = found
        copied = parts.fetches(node, chosen)
        fetches += copied
        if (needed := sum(fetch.slot.bytes for fetch in copied)) > node.free:
            missing.append((node.ranks[0], f"no memory for {show_bytes(needed)} of other nodes"))
    if not missing:
        return RestoreChoice(candidate.step, candidate.lineage, "memory", tuple(sources), tuple(fetches))
    missing.sort()
    shown = "; ".join(f"{why} (rank {rank})" if len(ranks) > 1 else why for rank, why in missing[:MAX_RANKS_IN_REASON])
    more = len(missing) - MAX_RANKS_IN_REASON
    return f"{shown}; and {more} more ranks" if more > 0 else shown


def _reason(chosen: RestoreChoice, world_size: int) -> str:
    if chosen.tier == "durable":
        return f"step {chosen.step} from durable storage (history {chosen.history})"
    if all(
        [(slot.rank, slot.world_size) for slot in slots] == [(rank, world_size)]
        for rank, slots in enumerate(chosen.sources)
    ):
        how = f"all {world_size} ranks hold their part" if world_size > 1 else "the newest valid state"
    else:
        how = f"resharded from {chosen.sources[0][0].world_size} ranks"
    return f"step {chosen.step} from memory (history {chosen.history}): {how}"
