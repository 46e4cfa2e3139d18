"""Torch's flight recorder: which collectives a rank has begun, and which of them it waits in.

Every backend has a recorder of its own. The entries of gloo never become "completed"; but gloo's collectives block the
host, so the last one is the one that a rank is in. NCCL's run on the device, many of them behind the host: there
the first one that is not completed holds up all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from zero2all.errors import Z2aError
from zero2all.records import parse_record

NCCL_PREFIX = "nccl:"


@dataclass(frozen=True)
class RecordedCollective:
    """An entry of the recorder, by torch's own names."""

    profiling_name: str
    collective_seq_id: int
    process_group: tuple[str, str]
    """Name and description."""
    time_created_ns: int
    state: str
    """``scheduled``, ``started`` or ``completed``."""
    p2p_seq_id: int = 0
    is_p2p: bool = False

    @property
    def number(self) -> int:
        return self.p2p_seq_id if self.is_p2p else self.collective_seq_id

    def __str__(self) -> str:
        return f"{self.profiling_name} number {self.number} of group {self.process_group[1]}"


def merge_dumps(dumps: Iterable[bytes]) -> bytes:
    """The entries of several recorders of a rank, in the order of their times."""
    entries = [entry for dump in dumps for entry in json.loads(dump or b"{}").get("entries", [])]
    return json.dumps({"entries": sorted(entries, key=lambda entry: entry["time_created_ns"])}).encode()


def read_collectives(dump: str) -> list[RecordedCollective]:
    """Empty if there is no dump, or this torch writes another format."""
    try:
        return parse_record(list[RecordedCollective], json.loads(dump or "{}").get("entries", []), "flight recorder")
    except (ValueError, Z2aError):
        return []


def pending_on_device(collectives: list[RecordedCollective]) -> list[RecordedCollective]:
    """NCCL's collectives that are not completed.

    The parts of a coalesced collective have no events and stay "scheduled", so one that is followed by a completed one
    in its group counts as completed: a group completes them in order.
    """
    pending, completed_groups = [], set()
    for collective in reversed(collectives):
        if collective.state == "completed":
            completed_groups.add(collective.process_group)
        elif collective.profiling_name.startswith(NCCL_PREFIX) and collective.process_group not in completed_groups:
            pending.append(collective)
    return pending[::-1]


def current_collective(collectives: list[RecordedCollective]) -> RecordedCollective | None:
    """The one that a rank is in: the first that its device has not completed, or the last that it began."""
    return next(iter([*pending_on_device(collectives)[:1], *collectives[-1:]]), None)
