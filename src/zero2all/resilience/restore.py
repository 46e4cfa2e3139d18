"""Which state a restart restores, from where, and why: one pure function over what the ranks report.

A state is known by its step *and* its history. One in memory is restored only if every rank can read its part of that
same state, and only if it lies on the line of the run: a node that was away may still hold states of a history that
the others have abandoned since. The line is the lineage of the last start or rollback, which the run directory keeps
(``history.json``); a durable checkpoint that descends from it extends it. Whatever does not fit falls back to durable
storage, and the decision says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zero2all.errors import Z2aError
from zero2all.resilience.lineage import Lineage, is_later, passes_through

Where = Literal["memory", "durable"]
SHOWN = 3  # ranks in a reason


@dataclass(frozen=True)
class SlotReport:
    """A state of one rank as it lies in the memory of a machine."""

    rank: int
    world: int
    step: int
    lineage: Lineage | None
    """None if it was written before histories were kept."""
    fits: bool
    """Whether the same rank of the same number of ranks can take it as it is: the layout of the weights is the same."""
    problem: str | None = None

    @property
    def history(self) -> str | None:
        return None if self.lineage is None else self.lineage[-1].history


@dataclass(frozen=True)
class RankReport:
    """What a rank sees in the memory of its machine: its own slots and those of others."""

    slots: tuple[SlotReport, ...] = ()


@dataclass(frozen=True)
class DurableReport:
    path: str
    step: int
    lineage: Lineage | None
    """None if it cannot be read; then there is a problem too."""
    problems: tuple[str, ...] = ()
    unreadable: bool = False
    """The problems are those of storage that does not answer: the checkpoint may well be valid."""


@dataclass(frozen=True)
class Chosen:
    step: int
    lineage: Lineage
    where: Where
    sources: tuple[tuple[SlotReport, ...], ...] = ()
    """For each rank the slots that it reads; empty for a durable checkpoint, of which every rank reads its part."""

    @property
    def history(self) -> str:
        return self.lineage[-1].history


@dataclass(frozen=True)
class Rejected:
    what: str
    step: int
    history: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.what} (history {self.history or 'unknown'}) is skipped: {self.why}"


@dataclass(frozen=True)
class Decision:
    chosen: Chosen | None
    reason: str
    rejected: tuple[Rejected, ...] = ()
    """Newer states, newest first, and why each is not the one."""


def summary(decision: Decision) -> dict[str, Any]:
    """For ``history.json`` and the failure report."""
    chosen = decision.chosen
    return {
        "step": None if chosen is None else chosen.step,
        "history": None if chosen is None else chosen.history,
        "where": None if chosen is None else chosen.where,
        "reason": decision.reason,
        "rejected": [str(rejected) for rejected in decision.rejected],
    }


def decide(
    ranks: Sequence[RankReport], durable: Sequence[DurableReport], line: Lineage | None, at_most: float = math.inf
) -> Decision:
    """The newest valid state of at most ``at_most`` steps on the run's line. ``ranks`` has a report of each, in order.

    ``line`` is the lineage that the run directory keeps; without one the newest durable checkpoint gives it. If no
    state on the line is valid, the newest valid durable checkpoint of an abandoned history is better than none.

    A checkpoint that cannot be read is not skipped: resuming from an older state would abandon it for good.
    """
    line = _extended(line, durable)
    candidates: list[Candidate] = [*_in_memory(ranks), *durable]
    rejected: list[Rejected] = []
    for candidate in sorted(candidates, key=_newest_first):
        if candidate.step > at_most:
            continue
        found = _off_the_line(candidate, line) or _state_of(candidate, ranks)
        if isinstance(found, Chosen):
            return Decision(found, _reason(found, len(ranks)), tuple(rejected))
        rejected.append(_rejected(candidate, found))
    for candidate in sorted(durable, key=_newest_first):
        if candidate.step > at_most:
            continue
        found = _state_of(candidate, ranks)
        if isinstance(found, Chosen):
            others = tuple(one for one in rejected if one.what != f"checkpoint {candidate.path}")
            reason = (
                f"{_reason(found, len(ranks))}; of an abandoned history, since no state of the current one is valid"
            )
            return Decision(found, reason, others)
    return Decision(None, "no valid state: training starts from scratch", tuple(rejected))


@dataclass(frozen=True)
class _InMemory:
    step: int
    lineage: Lineage | None


Candidate = _InMemory | DurableReport


def _in_memory(ranks: Sequence[RankReport]) -> list[_InMemory]:
    """Each once. An id stands for its lineage: those of a thousand ranks are long to compare."""
    found: dict[tuple[int, str | None], _InMemory] = {}
    for rank in ranks:
        for slot in rank.slots:
            found.setdefault((slot.step, slot.history), _InMemory(slot.step, slot.lineage))
    return list(found.values())


def _newest_first(candidate: Candidate) -> tuple[int, bool, int, str]:
    """Of one step, memory first, and the longer lineage: a history may save the very state that it began from."""
    lineage = candidate.lineage or ()
    last = lineage[-1].history if lineage else ""
    return -candidate.step, isinstance(candidate, DurableReport), -len(lineage), last


def _extended(line: Lineage | None, durable: Sequence[DurableReport]) -> Lineage | None:
    """A checkpoint that descends from the line is of a later start, whose note in the run directory was lost."""
    for report in sorted(durable, key=_newest_first):
        if report.lineage is not None and (line is None or is_later(report.lineage, line)):
            return report.lineage
    return line


def _off_the_line(state: Candidate, line: Lineage | None) -> str | None:
    if line is None or state.lineage is None:
        return None
    if passes_through(line, state.step, state.lineage[-1].history) or is_later(state.lineage, line):
        return None
    return f"of an abandoned history; the run continued as history {line[-1].history} from step {line[-1].first}"


def _rejected(candidate: Candidate, why: str) -> Rejected:
    what = (
        f"checkpoint {candidate.path}"
        if isinstance(candidate, DurableReport)
        else f"the state of step {candidate.step} in memory"
    )
    return Rejected(what, candidate.step, candidate.lineage[-1].history if candidate.lineage else None, why)


def _state_of(candidate: Candidate, ranks: Sequence[RankReport]) -> Chosen | str:
    """How every rank can read this state, or why not."""
    if isinstance(candidate, DurableReport):
        if candidate.unreadable:
            raise Z2aError(
                f"checkpoint {candidate.path} cannot be read: {'; '.join(candidate.problems)}; start again once it can "
                "be, or move it away to resume from an older state"
            )
        if candidate.problems or candidate.lineage is None:
            return "; ".join(candidate.problems) or "its lineage cannot be read"
        return Chosen(candidate.step, candidate.lineage, "durable")
    if candidate.lineage is None:
        return "written by an older version that kept no history"
    state = (candidate.step, candidate.lineage[-1].history)
    sources: list[tuple[SlotReport, ...]] = []
    missing: list[tuple[int, str]] = []
    for rank, report in enumerate(ranks):
        there = [slot for slot in report.slots if (slot.step, slot.history) == state]
        found = _of_rank(rank, len(ranks), there)
        if isinstance(found, str):
            missing.append((rank, found))
        else:
            sources.append(found)
    if not missing:
        return Chosen(candidate.step, candidate.lineage, "memory", tuple(sources))
    shown = "; ".join(f"{why} (rank {rank})" if len(ranks) > 1 else why for rank, why in missing[:SHOWN])
    return shown if len(missing) <= SHOWN else f"{shown}; and {len(missing) - SHOWN} more ranks"


def _of_rank(rank: int, world: int, there: list[SlotReport]) -> tuple[SlotReport, ...] | str:
    """Its own slot if it fits, else those of all ranks that there were, from which any layout can be read."""
    every: dict[int, SlotReport] = {}
    for slot in sorted(there, key=lambda slot: slot.problem is not None):
        every.setdefault(slot.rank, slot)
    if not every:
        return "not held here"
    of = there[0].world  # one history has one number of ranks
    if of == world and rank in every and every[rank].fits:
        return every[rank].problem or (every[rank],)
    if len(every) < of:
        return f"{len(every)} of the {of} ranks' parts are held here"
    problem = next((slot.problem for slot in every.values() if slot.problem is not None), None)
    return problem or tuple(every[number] for number in sorted(every))


def _reason(chosen: Chosen, world: int) -> str:
    if chosen.where == "durable":
        return f"step {chosen.step} from durable storage (history {chosen.history})"
    if all([(slot.rank, slot.world) for slot in slots] == [(rank, world)] for rank, slots in enumerate(chosen.sources)):
        how = f"all {world} ranks hold their part" if world > 1 else "the newest valid state"
    else:
        how = f"resharded from {chosen.sources[0][0].world} ranks"
    return f"step {chosen.step} from memory (history {chosen.history}): {how}"
