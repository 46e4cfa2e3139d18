"""The two slots in which a node keeps the states of a rank that is on another node."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from zero2all.checkpoint.flash import (
    ShardSpec,
    Slot,
    SlotHeader,
    padded_bytes,
    slot_bytes,
)
from zero2all.checkpoint.lineage import contains_state
from zero2all.errors import Z2aError
from zero2all.io import read_record, write_text
from zero2all.records import parse_record

LAYOUT_FILE = "layout.json"
MAX_LAYOUT_BYTES = 256 << 20
MAX_DIMENSIONS = 64


class RejectedStateError(Z2aError):
    """A state from a peer that is not valid, or not what was agreed on."""


class ReplicaSlots:
    """Receives states into a directory. A slot is overwritten only while the other one is valid, or if it is not.

    >>> slots = ReplicaSlots(directory / "replica-5-of-8", size=5 << 20)
    >>> slots.receive(header, layout, fill)   # ``fill`` writes the bytes into the memory it is given
    """

    def __init__(self, directory: Path, size: int) -> None:
        """Allocates memory for two states of ``size`` bytes; an OSError says that there is not enough."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory, self.size = directory, padded_bytes(size)
        self._slots = [self._open(number) for number in range(2)]

    def _open(self, number: int) -> Slot:
        path = self.directory / f"slot-{number}.bin"
        with suppress(FileNotFoundError):
            if path.stat().st_size != self.size:  # of another layout
                path.with_suffix(".json").unlink(missing_ok=True)
        return Slot(self.size, path)

    def receive(self, header: SlotHeader, layout: bytes, fill: Callable[[memoryview], None]) -> None:
        """Raises an error if the state is not valid; then the slot stays invalid, and the other one as it was."""
        self._check(header, layout)
        assert header.lineage is not None
        self._set_layout(layout.decode())
        slot = self._slot_to_overwrite(header)
        slot.begin(header.step, header.lineage)
        fill(slot.data.numpy().data)
        if (problem := slot.adopt(header)) is not None:
            raise RejectedStateError(f"the state of step {header.step} is rejected: {problem}")

    def _check(self, header: SlotHeader, layout: bytes) -> None:
        if header.step < 0 or header.lineage is None or header.hash is None or header.state is None:
            raise RejectedStateError("an incomplete marker")
        try:
            specs = parse_record(list[ShardSpec], json.loads(layout.decode()), "the layout of a peer")
        except (ValueError, RecursionError) as error:
            raise RejectedStateError(f"a layout that is not JSON: {error}") from None
        for spec in specs:
            _check_spec(spec)
        if padded_bytes(slot_bytes(specs)) != self.size:
            raise RejectedStateError(f"a layout of {slot_bytes(specs)} bytes for a slot of {self.size}")

    def _set_layout(self, layout: str) -> None:
        """Both slots share it: with another one neither is valid."""
        path = self.directory / LAYOUT_FILE
        with suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == layout:
                return
        for slot in self._slots:
            slot.marker.unlink(missing_ok=True)
        write_text(path, layout)

    def _slot_to_overwrite(self, header: SlotHeader) -> Slot:
        """One without a valid state, or with one that the new state's history has abandoned; else the older one."""
        assert header.lineage is not None

        def worth(slot: Slot) -> int:
            try:
                held = read_record(SlotHeader, slot.marker)
            except (OSError, Z2aError):
                return -1
            assert header.lineage is not None
            if held.hash is None or held.lineage is None or held.step >= header.step:
                return -1  # the same state again: the one held is damaged
            return held.step if contains_state(header.lineage, held.step, held.lineage[-1].history) else -1

        return min(self._slots, key=worth)


def _check_spec(spec: ShardSpec) -> None:
    """It names memory inside the slot, and a tensor that torch can make of it."""
    dtype = getattr(torch, spec.dtype, None)
    numbers = [spec.at, spec.bytes, *spec.size, *spec.offsets, *spec.sizes]
    elements = 1
    for length in spec.sizes[:MAX_DIMENSIONS]:
        elements *= length
    if (
        not isinstance(dtype, torch.dtype)
        or min(numbers) < 0
        or max(numbers) >= 1 << 62
        or not len(spec.size) == len(spec.offsets) == len(spec.sizes) <= MAX_DIMENSIONS
        or elements * dtype.itemsize != spec.bytes
    ):
        raise RejectedStateError(f"a layout in which {spec.name[:80]!r} is no tensor")
