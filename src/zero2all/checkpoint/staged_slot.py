"""Reads the slots that any process of this machine has left in memory."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_record
from zero2all.checkpoint.slot_directories import rank_directories
from zero2all.checkpoint.slot_format import HASH_BLOCK, LAYOUT_FILE, ShardSpec, SlotHeader, slot_checksum
from zero2all.checkpoint.training_state import Lineage, contains_state


def map_slot(path: Path) -> Tensor:
    """The bytes of a slot; what is written to them does not reach the file."""
    with open(path, "rb") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


@dataclass(frozen=True)
class StagedSlot:
    """A slot as its marker describes it, readable by any process."""

    data: Path
    rank: int
    world_size: int
    header: SlotHeader
    replica: bool = False
    """True if the rank was on another node."""

    def problem(self) -> str | None:
        """The reason why it is not valid; None if it is."""
        if self.header.hash is None:
            return "was not finished"
        try:
            data = map_slot(self.data)
        except (OSError, ValueError):
            return "cannot be read"
        if len(data) % HASH_BLOCK == 0 and slot_checksum(data) == self.header.hash:
            return None
        return "does not match its checksum"

    def shard_specs(self) -> list[ShardSpec]:
        return read_record(list[ShardSpec], self.data.with_name(LAYOUT_FILE))


def find_staged_slots(directory: Path) -> list[StagedSlot]:
    """All slots below a run's directory that have a marker."""
    slots = []
    for path in [path for parent in rank_directories(directory) for path in sorted(parent.glob("slot-*.json"))]:
        try:
            kind, rank, _, world_size = path.parent.name.split("-")
            header = read_record(SlotHeader, path)
            slots.append(StagedSlot(path.with_suffix(".bin"), int(rank), int(world_size), header, kind == "replica"))
        except (OSError, ValueError, Z2aError):
            continue  # being written or removed at this moment
    return slots


def drop_abandoned_slots(directory: Path, lineage: Lineage) -> None:
    """Invalidate states that ``lineage`` does not contain."""
    for slot in find_staged_slots(directory):
        if not contains_state(lineage, slot.header.step, slot.header.lineage[-1].history):
            slot.data.with_suffix(".json").unlink(missing_ok=True)
