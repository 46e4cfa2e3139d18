"""Torch's flight recorder: which collectives a rank has begun, and which of them it waits in.

Every backend has a recorder of its own. The entries of gloo never become "completed", but "retired" when they are over.
NCCL's run on the device, many of them behind the host: there the first one that is not completed holds up all others of
its group. A group has two rows of numbers, one for collectives and one for sends and receives.

With data, tensor and pipeline parallelism a stuck rank holds up its own groups, those hold up theirs, and soon every
rank waits. The traces of all ranks give a graph: an edge from each rank that waits in a collective to each that has not
come to it. Where it ends is the cause. Ranks that came to another collective are the cause themselves.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.base.errors import Z2aError
from zero2all.base.records import Record, parse_record, to_json
from zero2all.cluster.launch.heartbeat import DevicePosition

NCCL_PREFIX = "nccl:"
RECENT = 4  # collectives of a group in a failure report, around the one in which the rank waits


@dataclass(frozen=True)
class RecordedCollective:
    """An entry of the recorder, by torch's own names."""

    profiling_name: str
    collective_seq_id: int
    process_group: tuple[str, str]
    """Name and description."""
    time_created_ns: int
    state: str
    """``scheduled``, ``started`` (only with TORCH_NCCL_ENABLE_TIMING) or ``completed``."""
    p2p_seq_id: int = 0
    is_p2p: bool = False
    retired: bool = False
    input_sizes: list[list[int]] = field(default_factory=list)
    input_dtypes: list[str] = field(default_factory=list)
    output_sizes: list[list[int]] = field(default_factory=list)
    thread_id: str = ""

    @property
    def number(self) -> int:
        return self.p2p_seq_id if self.is_p2p else self.collective_seq_id

    @property
    def operation(self) -> str:
        """The name of the collective without the backend, and without the ranks of a send or receive."""
        return self.profiling_name.partition(":")[2].partition(" ")[0].removeprefix("_")

    @property
    def is_on_device(self) -> bool:
        return self.profiling_name.startswith(NCCL_PREFIX)

    @property
    def is_done(self) -> bool:
        return self.state == "completed" or (self.retired and not self.is_on_device)

    def __str__(self) -> str:
        return f"{self.profiling_name} number {self.number} of group {self.process_group[1]}"

    def with_sizes(self) -> str:
        shapes = ", ".join(map(str, self.input_sizes))
        return f"{self} ({' '.join([*dict.fromkeys(self.input_dtypes), shapes])})" if shapes else str(self)


@dataclass(frozen=True)
class GroupTrace:
    """Where a rank is in one process group. Two groups may have one name: every rank knows only its own ones."""

    name: str
    ranks: list[int]
    """The ranks in the order of the group, which sends and receives count in."""
    is_p2p: bool
    begun: int
    """The number of the last one that it has begun."""
    recent: list[RecordedCollective]
    """The collectives around the pending one, or the last ones."""
    pending: RecordedCollective | None = None
    """The first that is not done, if this holds up the rank."""

    def at(self, number: int) -> RecordedCollective | None:
        return next((one for one in self.recent if one.number == number), None)


@dataclass(frozen=True)
class DeviceState:
    """How far the device of a rank is."""

    position: DevicePosition | None = None
    """What it is in; None if it has finished what was launched, or there is no GPU."""
    host_waits: bool = False
    """Whether the host waits for it."""


def merge_dumps(
    dumps: Iterable[bytes], groups: Mapping[str, list[int]], main_thread: int, device: DeviceState | None = None
) -> bytes:
    """The entries of several recorders of a rank, in the order of their times, with the ranks of its groups."""
    parsed = [json.loads(dump or b"{}") for dump in dumps]
    entries = [entry for dump in parsed for entry in dump.get("entries", [])]
    merged: dict[str, Any] = {
        "entries": sorted(entries, key=lambda entry: entry["time_created_ns"]),
        "groups": {**dict(_configured_groups(parsed)), **groups},
        "main_thread": str(main_thread),
        "device": to_json(device or DeviceState()),
    }
    return json.dumps(merged).encode()


def _configured_groups(dumps: list[dict[str, Any]]) -> Iterable[tuple[str, list[int]]]:
    """NCCL's recorder knows the ranks of a group: ``{"3": {"name": "3", "desc": "tp", "ranks": "[0, 1]"}}``."""
    for dump in dumps:
        for name, group in dump.get("pg_config", {}).items():
            if ranks := json.loads(group.get("ranks") or "[]"):
                yield name, ranks


def _read_part(record: type[Record], dump: str, name: str, empty: Record) -> Record:
    """``empty`` if there is no dump, or this torch writes another format."""
    try:
        found = json.loads(dump or "{}").get(name)
        return empty if found is None else parse_record(record, found, "flight recorder")
    except (ValueError, Z2aError):
        return empty


def read_collectives(dump: str) -> list[RecordedCollective]:
    return _read_part(list[RecordedCollective], dump, "entries", [])


def read_groups(dump: str) -> dict[str, list[int]]:
    """The ranks of each group."""
    return _read_part(dict[str, list[int]], dump, "groups", {})


def read_device_state(dump: str) -> DeviceState:
    return _read_part(DeviceState, dump, "device", DeviceState())


def read_group_traces(dump: str) -> list[GroupTrace]:
    """Where a rank is in each of its groups."""
    collectives = read_collectives(dump)
    if not collectives:
        return []
    groups, main_thread = read_groups(dump), json.loads(dump).get("main_thread", "")
    rows: defaultdict[tuple[str, bool], list[RecordedCollective]] = defaultdict(list)
    for one in collectives:
        rows[one.process_group[0], one.is_p2p].append(one)
    return [
        _group_trace(name, groups[name], is_p2p=is_p2p, row=row, main_thread=main_thread)
        for (name, is_p2p), row in rows.items()
        if groups.get(name)
    ]


def _group_trace(
    name: str, ranks: list[int], *, is_p2p: bool, row: list[RecordedCollective], main_thread: str
) -> GroupTrace:
    # A thread that writes checkpoints may wait in a collective of gloo while the rank itself goes on.
    pending = next((one for one in _pending(row) if one.is_on_device or one.thread_id in ("", main_thread)), None)
    place = len(row) - 1 if pending is None else row.index(pending)
    recent = row[max(0, place - RECENT // 2) : place + RECENT // 2 + 1]
    return GroupTrace(name, ranks, is_p2p, max(one.number for one in row), recent, pending)


def _pending(collectives: list[RecordedCollective]) -> list[RecordedCollective]:
    """Collectives that are not done.

    The parts of a coalesced collective have no events and stay "scheduled", so one that is followed by a completed one
    in its group counts as completed: a group completes them in order.
    """
    pending, completed_groups = [], set()
    for collective in reversed(collectives):
        if collective.is_done:
            completed_groups.add(collective.process_group)
        elif collective.process_group not in completed_groups:
            pending.append(collective)
    return pending[::-1]


def pending_on_device(collectives: list[RecordedCollective]) -> list[RecordedCollective]:
    """NCCL's collectives that are not completed."""
    return [one for one in _pending(collectives) if one.is_on_device]


def current_collective(collectives: list[RecordedCollective]) -> RecordedCollective | None:
    """The one that a rank is in: the first that its device has not completed, or the last that it began."""
    return next(iter([*pending_on_device(collectives)[:1], *collectives[-1:]]), None)


Traces = Mapping[int, Sequence[GroupTrace]]
"""The traces of each rank."""
_ENDS = re.compile(r":(?:send (?P<source>\d+)->(?P<to>\d+)|recv (?P<at>\d+)<-(?P<origin>\d+))")
# Collectives of which every rank may pass other sizes, or only one rank passes any.
_UNEVEN = re.compile(r"all_?to_?all|gather$|scatter$|broadcast|send|recv|coalesced|barrier")
_EVEN = re.compile(r"all_?gather|reduce_scatter")


@dataclass(frozen=True)
class Cause:
    rank: int
    why: str


@dataclass(frozen=True)
class _Wait:
    """A rank waits in a collective for others."""

    rank: int
    group: tuple[int, ...]
    pending: RecordedCollective
    missing: tuple[int, ...]
    """They have not come to it."""
    unstarted: tuple[int, ...]
    """They have, but their devices have not come to it."""


def find_causes(traces: Traces, *, heard_all: bool) -> list[Cause]:
    """The ranks that the others wait for. Without ``heard_all``, a rank that sent no trace is not named: its node may
    not have reported yet."""
    waits = [wait for row in _by_group(traces) for wait in _waits(row)]
    unlike = [_mismatches(row, _operation) for row in _by_group(traces)]
    uneven = [_mismatches(row, _sizes) for row in _by_group(traces)]
    return (
        _unique(cause for causes in unlike for cause in causes)
        or _ends(waits, traces, heard_all=heard_all)
        or _unique(cause for causes in uneven for cause in causes)
        or _cycle(waits)
    )


def _by_group(traces: Traces) -> list[dict[int, GroupTrace]]:
    """The traces of each group, by rank."""
    found: defaultdict[tuple[str, tuple[int, ...], bool], dict[int, GroupTrace]] = defaultdict(dict)
    for rank, groups in traces.items():
        for trace in groups:
            found[trace.name, tuple(trace.ranks), trace.is_p2p][rank] = trace
    return list(found.values())


def _waits(row: Mapping[int, GroupTrace]) -> Iterable[_Wait]:
    for rank, trace in row.items():
        if (pending := trace.pending) is None:
            continue
        others = _partners(trace, pending) - {rank}
        missing = tuple(sorted(other for other in others if not _has_come(row.get(other), pending)))
        unstarted: tuple[int, ...] = ()
        if pending.state == "started":
            unstarted = tuple(
                sorted(other for other in others - set(missing) if _is_scheduled(row[other], pending.number))
            )
        yield _Wait(rank, tuple(trace.ranks), pending, missing, unstarted)


def _partners(trace: GroupTrace, pending: RecordedCollective) -> set[int]:
    ends = _ENDS.search(pending.profiling_name)
    if ends is None:
        return set(trace.ranks)
    places = [int(place) for place in ends.groups() if place is not None]
    return {trace.ranks[place] for place in places if place < len(trace.ranks)}


def _has_come(trace: GroupTrace | None, pending: RecordedCollective) -> bool:
    """Whether a rank has come to a collective of the group, or to the other end of a send."""
    if trace is None:
        return False
    ends = _ENDS.search(pending.profiling_name)
    if ends is None:
        held_up_before = trace.pending is not None and trace.pending.number < pending.number
        return trace.begun >= pending.number and not held_up_before
    source, to = (ends["source"], ends["to"]) if ends["source"] else (ends["origin"], ends["at"])
    other_end = f":recv {to}<-{source}" if ends["source"] else f":send {source}->{to}"
    return any(one.profiling_name.endswith(other_end) and not one.is_done for one in trace.recent)


def _is_scheduled(trace: GroupTrace, number: int) -> bool:
    return trace.pending is not None and trace.pending.number == number and trace.pending.state == "scheduled"


def _ends(waits: list[_Wait], traces: Traces, *, heard_all: bool) -> list[Cause]:
    """The ranks that others wait for, and that wait for nobody."""
    waiting = {wait.rank for wait in waits if wait.missing or wait.unstarted}
    found: dict[int, str] = {}
    for wait in sorted(waits, key=lambda wait: wait.rank):
        where = f"{wait.pending.with_sizes()}, in which {show_ranks(_in_the_same(wait, waits))}"
        for rank in wait.missing:
            found.setdefault(rank, _why_missing(traces.get(rank, ()), wait, where))
        for rank in wait.unstarted:
            why = f"has launched {where}, but its device has not come to it: a kernel before it is stuck"
            found.setdefault(rank, why)
    return [
        Cause(rank, why) for rank, why in sorted(found.items()) if rank not in waiting and (heard_all or rank in traces)
    ]


def _why_missing(traces: Sequence[GroupTrace], wait: _Wait, where: str) -> str:
    if not traces:
        return f"sent no trace: it has exited or does not answer; it has not come to {where}"
    name, is_p2p = wait.pending.process_group[0], wait.pending.is_p2p
    mine = next((one for one in traces if (one.name, one.is_p2p) == (name, is_p2p)), None)
    if mine is not None and mine.pending is not None and not is_p2p:
        return f"has not completed {mine.pending.with_sizes()}, but the others have: they wait in {wait.pending}"
    return f"is not in the collective that the others wait in: it has not begun {where}"


def _in_the_same(wait: _Wait, waits: list[_Wait]) -> list[int]:
    """The ranks that wait in the same collective; those whose device has not come to it do not."""
    key = (wait.group, wait.pending.process_group, wait.pending.is_p2p, wait.pending.number)
    found = [
        (other.rank, (other.group, other.pending.process_group, other.pending.is_p2p, other.pending.number))
        for other in waits
    ]
    return [rank for rank, other in found if other == key and rank not in wait.unstarted]


def _operation(one: RecordedCollective) -> str:
    return "" if one.is_p2p else one.operation


def _sizes(one: RecordedCollective) -> str:
    is_free = _UNEVEN.search(one.operation) and not _EVEN.search(one.operation)
    return "" if is_free or one.is_p2p else str((one.input_sizes, one.output_sizes, one.input_dtypes))


def _mismatches(row: Mapping[int, GroupTrace], view: Callable[[RecordedCollective], str]) -> list[Cause]:
    """Ranks of a group that came to another collective than most under the same number; all of them if none is most."""
    numbers = [trace.pending.number for trace in row.values() if trace.pending is not None]
    if not numbers or next(iter(row.values())).is_p2p:
        return []
    at = {rank: one for rank, trace in row.items() if (one := trace.at(min(numbers))) is not None}
    counts = Counter(view(one) for one in at.values())
    if len(counts) < 2:
        return []
    (most, count), (_, next_count) = counts.most_common(2)
    common = {rank: one for rank, one in at.items() if count > next_count and view(one) == most}
    causes = []
    for rank, one in sorted(at.items()):
        if rank not in common:
            others = common or {other: two for other, two in at.items() if view(two) != view(one)}
            theirs = next(iter(others.values())).with_sizes()
            words = f"{one.with_sizes()}, where {show_ranks(others, 'began')} {theirs}"
            causes.append(Cause(rank, f"is in another collective than the others: {words}"))
    return causes


def _cycle(waits: list[_Wait]) -> list[Cause]:
    """Ranks that wait for each other: they use their groups in different orders."""
    by_rank: dict[int, _Wait] = {}
    for wait in waits:
        if wait.missing:
            by_rank.setdefault(wait.rank, wait)
    if not by_rank:
        return []
    walked: list[int] = [min(by_rank)]
    while (following := by_rank[walked[-1]].missing[0]) not in walked:
        if following not in by_rank:
            return []
        walked.append(following)
    ring = walked[walked.index(following) :]
    return [
        Cause(
            rank,
            f"waits in {by_rank[rank].pending.with_sizes()} for rank {by_rank[rank].missing[0]}, which waits for it "
            "elsewhere: the ranks use their groups in different orders",
        )
        for rank in ring
    ]


def _unique(causes: Iterable[Cause]) -> list[Cause]:
    return sorted({cause.rank: cause for cause in causes}.values(), key=lambda cause: cause.rank)


def show_ranks(ranks: Iterable[int], verb: str = "") -> str:
    """``ranks 0-3 and 6 wait``."""
    ordered = sorted(set(ranks))
    starts = [rank for rank in ordered if rank - 1 not in ordered]
    ends = [rank for rank in ordered if rank + 1 not in ordered]
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)]
    several = len(ordered) > 1
    listed = " and ".join([", ".join(spans[:-1]), spans[-1]] if len(spans) > 1 else spans)
    return f"{'ranks' if several else 'rank'} {listed} {verb or ('wait' if several else 'waits')}"
