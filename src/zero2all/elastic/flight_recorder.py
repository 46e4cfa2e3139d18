"""Torch's flight recorder: which collectives a rank has begun, and which of them it waits in.

Every backend has a recorder of its own. The entries of gloo never become "completed", but "retired" when they are over.
NCCL's run on the device, many of them behind the host: there the first one that is not completed holds up all others of
its group. A group has two rows of numbers, one for collectives and one for sends and receives.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zero2all.device_watch import DevicePosition
from zero2all.errors import Z2aError
from zero2all.records import Record, parse_record, to_json

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
        """Without the backend and, of a send or receive, the ranks."""
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
    """In the order of the group, which sends and receives count in."""
    is_p2p: bool
    begun: int
    """The number of the last one that it has begun."""
    recent: list[RecordedCollective]
    """Those around the pending one, or the last ones."""
    pending: RecordedCollective | None = None
    """The first that is not done, if this holds up the rank."""

    def at(self, number: int) -> RecordedCollective | None:
        return next((one for one in self.recent if one.number == number), None)


@dataclass(frozen=True)
class DeviceState:
    """How far the device of a rank is."""

    position: DevicePosition | None = None
    """None: it has finished what was launched, or there is no GPU."""
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
        _group_trace(name, groups[name], is_p2p, row, main_thread)
        for (name, is_p2p), row in rows.items()
        if groups.get(name)
    ]


def _group_trace(
    name: str, ranks: list[int], is_p2p: bool, row: list[RecordedCollective], main_thread: str
) -> GroupTrace:
    # A thread that writes checkpoints may wait in a collective of gloo while the rank itself goes on.
    pending = next((one for one in _pending(row) if one.is_on_device or one.thread_id in ("", main_thread)), None)
    place = len(row) - 1 if pending is None else row.index(pending)
    recent = row[max(0, place - RECENT // 2) : place + RECENT // 2 + 1]
    return GroupTrace(name, ranks, is_p2p, max(one.number for one in row), recent, pending)


def _pending(collectives: list[RecordedCollective]) -> list[RecordedCollective]:
    """Those that are not done.

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
