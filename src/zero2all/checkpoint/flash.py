"""Flash checkpoints: writes the state of each rank to memory that outlives its process (see ``slot_format``)."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.io import read_record, write_json
from zero2all.base.torch_private import foreach_copy_
from zero2all.base.units import show_bytes
from zero2all.checkpoint.background import run_in_background
from zero2all.checkpoint.slot_format import (
    LAYOUT_FILE,
    ShardSpec,
    SlotHeader,
    layout_fingerprint,
    padded_bytes,
    slot_bytes,
    slot_checksum,
    slot_layout,
)
from zero2all.checkpoint.state_dict import local_shard
from zero2all.checkpoint.training_state import CheckpointCallbacks, Lineage, TrainingState, ignore


class Slot:
    """Memory for one state: a file in a tmpfs, or memory private to this process."""

    def __init__(self, size: int, path: Path | None) -> None:
        self.path, self.step = path, -1
        self.header: SlotHeader | None = None
        """The marker of the state in the slot, once this process has committed it to a file."""
        self._lineage: Lineage = ()
        self.commit_future: Future[None] | None = None
        self.reader_future: Future[None] | None = None  # a durable write that reads it
        size = padded_bytes(size)
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            self.step = _step_in_marker(self.marker)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, size)
                if hasattr(os, "posix_fallocate"):  # fails here if memory is full, not by a SIGBUS later
                    os.posix_fallocate(descriptor, 0, size)
                # Pages are allocated before the first state is staged.
                self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            finally:
                os.close(descriptor)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def marker(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".json")

    def begin(self, step: int, lineage: Lineage) -> None:
        """Invalidate the slot."""
        self.step, self._lineage, self.header = step, lineage, None
        if self.path is not None:
            self.marker.unlink(missing_ok=True)
            self._mark(SlotHeader(step, lineage))

    def finish(self, layout: str, state: TrainingState) -> None:
        """Commit the slot: write its checksum."""
        if self.path is not None:
            checksum = slot_checksum(self.data)
            self._commit(SlotHeader(self.step, self._lineage, time.time(), layout, checksum, state))

    def adopt(self, header: SlotHeader) -> str | None:
        """Commit data that was received with this marker; returns why not, if it does not match."""
        if slot_checksum(self.data) != header.hash:
            self.discard()
            return "it does not match its checksum"
        return None if self._commit(header) else "it cannot be kept in memory"

    def discard(self) -> None:
        """Give the state up: the slot is overwritten before the other one, which may hold a valid state."""
        self.step = -1

    def _commit(self, header: SlotHeader) -> bool:
        if not self._mark(header):
            self.discard()
            return False
        self.header = header
        return True

    def _mark(self, header: SlotHeader) -> bool:
        partial = self.marker.with_suffix(".partial")
        fields = {name: value for name, value in asdict(header).items() if value is not None}
        try:
            partial.write_text(json.dumps(fields), encoding="utf-8")
            partial.replace(self.marker)
        except OSError as error:  # another process filled the tmpfs: training continues
            warn(f"the state of step {self.step} cannot be kept in memory: {error}", every_rank=True)
            return False
        return True


def _step_in_marker(marker: Path) -> int:
    """The step of the valid state that a slot holds from an earlier process; -1 if there is none."""
    try:
        header = read_record(SlotHeader, marker)
    except (OSError, Z2aError):
        return -1
    return header.step if header.hash is not None else -1


class Slots:
    """The slots of this rank: two in a directory, or one in private memory without a directory.

    >>> slots = Slots(tensors, directory / "rank-0-of-1")
    >>> slot = slots.stage(20, lineage, tensors, state, record.flush)  # returns after one copy
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        directory: Path | None,
        callbacks: CheckpointCallbacks | None = None,
        after_commit: Callable[[Slot], None] = ignore,
    ) -> None:
        """``after_commit`` is called in the background with each slot that is valid."""
        self._callbacks, self._after_commit = callbacks or CheckpointCallbacks(), after_commit
        self.shard_specs = slot_layout(tensors)
        self._layout = layout_fingerprint(self.shard_specs)
        size = slot_bytes(self.shard_specs)
        if directory is None:
            self.slots = [Slot(size, None)]
        else:
            _prepare_slot_directory(directory, self.shard_specs)
            self.slots = [Slot(size, directory / f"slot-{number}.bin") for number in range(2)]
        if any(tensor.is_cuda for tensor in tensors.values()):
            for slot in self.slots:
                pin_slot_memory(slot.data)
        self._views = [[spec.view(slot.data) for spec in self.shard_specs] for slot in self.slots]

    def stage(
        self,
        step: int,
        lineage: Lineage,
        tensors: dict[str, Tensor],
        state: TrainingState,
        before_commit: Callable[[], bool],
    ) -> Slot:
        """Copy the state; the checksum and the marker follow in the background, if ``before_commit`` returns True."""
        slot = self._slot_to_overwrite()
        slot.begin(step, lineage)
        self._callbacks.on_phase("staging")
        views = self._views[self.slots.index(slot)]
        foreach_copy_(views, [local_shard(tensors[spec.name]) for spec in self.shard_specs])

        def finish() -> None:
            if before_commit():
                self._callbacks.on_phase("marker")
                slot.finish(self._layout, state)
                self._after_commit(slot)
            else:
                warn(f"the state of step {step} is not kept in memory: the run record has not caught up with it")
                slot.discard()

        slot.commit_future = run_in_background(finish)
        return slot

    def views(self, slot: Slot) -> dict[str, Tensor]:
        """The tensors of a slot, without a copy."""
        return {
            spec.name: view for spec, view in zip(self.shard_specs, self._views[self.slots.index(slot)], strict=True)
        }

    def wait(self) -> None:
        """Wait until every staged state has its marker."""
        for slot in self.slots:
            if slot.commit_future is not None:
                slot.commit_future.result()

    def _slot_to_overwrite(self) -> Slot:
        """The slot to overwrite: the one with the older state, unless it is being read."""
        self.wait()  # until the newer one is valid, the older one is the only state
        free = [slot for slot in self.slots if slot.reader_future is None or slot.reader_future.done()]
        if not free:
            assert self.slots[0].reader_future is not None
            self.slots[0].reader_future.exception()
            free = self.slots
        return min(free, key=lambda slot: slot.step)


def _prepare_slot_directory(directory: Path, specs: list[ShardSpec]) -> None:
    """Keep the slots of an earlier process with the same layout until they are overwritten."""
    layout = directory / LAYOUT_FILE
    try:
        same = read_record(list[ShardSpec], layout) == specs
    except (OSError, Z2aError):
        same = False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not same:
        for old in directory.glob("slot-*"):
            old.unlink(missing_ok=True)
        write_json(layout, [asdict(spec) for spec in specs])


def pin_slot_memory(data: Tensor) -> None:
    """Pin memory: copies from the device become several times as fast. Without it they still work."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if code != 0:
        clear_cuda_error()
        warn(
            f"{show_bytes(data.numel())} for states in memory cannot be pinned (CUDA error {code}): checkpoints stall "
            "training for longer; see 'ulimit -l'"
        )


def clear_cuda_error() -> None:
    """A failed call stays CUDA's last error, which the next kernel would report: consume it here."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
