"""Which node holds which parts of a state in memory, and which parts must be copied so that every rank can read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zero2all.checkpoint.lineage import Lineage

StateKey = tuple[int, str | None]
"""Step and history."""


@dataclass(frozen=True)
class SlotReport:
    """A state of one rank in the memory of a machine."""

    rank: int
    world_size: int
    step: int
    lineage: Lineage | None
    """None if it was written before histories were recorded."""
    layout: str
    """The same rank of the same world size can load it directly if it shards the weights the same way."""
    problem: str | None = None
    replica: bool = False
    bytes: int = 0
    fetchable: bool = True
    """False once another node has failed to copy it."""

    @property
    def history(self) -> str | None:
        return None if self.lineage is None else self.lineage[-1].history


@dataclass(frozen=True)
class RankReport:
    """The slots in the memory of a rank's machine: its own and those of others. Ranks of a node report the same."""

    slots: tuple[SlotReport, ...] = ()
    layout: str = ""
    """How this rank shards the weights."""
    node: int | None = None
    """None if no other node can be reached: then it reads only what it reports."""
    free: float = math.inf
    """Bytes of memory for what is copied from other nodes."""


@dataclass(frozen=True)
class Fetch:
    """A part that rank ``to`` copies from the node of rank ``holder``, for all ranks of its own node."""

    slot: SlotReport
    holder: int
    to: int


@dataclass(frozen=True)
class NodeMemory:
    """What the memory of one node holds."""

    number: int | None
    """None if no other node can reach it; then it has one rank, which reads only what it reports."""
    ranks: list[int]
    free: float
    states: dict[StateKey, dict[int, SlotReport]] = field(default_factory=dict)
    """The best slot of each part, by the rank that saved it."""


def group_by_node(ranks: Sequence[RankReport]) -> list[NodeMemory]:
    """Indexed once: every candidate is then looked up."""
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
        """Its own slot if the layout matches, else those of all saved ranks, from which any layout can be resharded."""
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
                # Its own parts, before those of other nodes, before its damaged ones.
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
    """In order of ranks, or why they are not enough."""
    if len(parts) < world_size:
        return f"{len(parts)} of the {world_size} ranks' parts are held here"
    problem = next((slot.problem for slot in parts.values() if slot.problem is not None), None)
    return problem or tuple(parts[part] for part in sorted(parts))
