"""The states of this rank in memory, and their replicas on other nodes."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from torch import Tensor

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.units import show_bytes
from zero2all.checkpoint.flash import Slot, Slots
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.replicas import ReplicaOptions, Replicas
from zero2all.checkpoint.slot_directories import (
    claim_flash_directory,
    privacy_problem,
    rank_directory,
    register_rank_directory,
    remove_stale_ranks,
)
from zero2all.checkpoint.slot_format import slot_bytes, slot_layout
from zero2all.checkpoint.staged_slot import drop_abandoned_slots
from zero2all.checkpoint.training_state import CheckpointCallbacks, Lineage


class MemoryTier:
    """Two states per rank in a flash directory, which a restart finds there.

    Without a directory there is one state in private memory: saving stalls no longer, but a restart does not find it.
    """

    def __init__(
        self,
        directory: Path | None,
        run_directory: Path,
        options: ReplicaOptions | None,
        rank_group: RankGroup,
        callbacks: CheckpointCallbacks,
    ) -> None:
        self.directory, self._run_directory = directory, run_directory
        self._rank_group, self._callbacks = rank_group, callbacks
        self.replicas: Replicas | None = None
        if directory is not None and options is not None and options.copies > 0:
            self.replicas = Replicas.connect(options, directory, rank_group)
        self._slots: Slots | None = None

    def open_slots(self, tensors: dict[str, Tensor], history: str) -> Slots:
        """The slots, allocated at the first call. If memory is full, ``directory`` is None from then on."""
        if self._slots is None:
            self._slots = self._make_slots(tensors, history)
        return self._slots

    def wait(self) -> None:
        """Wait until every staged state has its marker."""
        if self._slots is not None:
            self._slots.wait()

    def drop_abandoned(self, lineage: Lineage) -> None:
        """Invalidate the states that ``lineage`` does not contain."""
        if self.directory is not None and privacy_problem(self.directory) is None:
            drop_abandoned_slots(self.directory, lineage)

    def discard_after(self, step: int) -> None:
        """Overwrite later states first: a rollback has abandoned them."""
        for slot in self._slots.slots if self._slots is not None else []:
            if slot.step > step:
                slot.discard()

    def close(self, *, has_failed: bool) -> None:
        if self.replicas is not None:
            self.replicas.stop_sending()
            if not has_failed:  # after a failure other ranks may be gone
                self._rank_group.on_all_ranks(lambda: None)
            self.replicas.close()

    def remove(self) -> None:
        """Remove all states in memory, once every rank has finished."""
        if self.directory is not None:
            self._rank_group.on_all_ranks(lambda: None)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _make_slots(self, tensors: dict[str, Tensor], history: str) -> Slots:
        if self.directory is None:
            return Slots(tensors, None, self._callbacks)
        directory = self.directory
        own_directory = rank_directory(directory, self._rank_group.rank, self._rank_group.world_size)

        def claim() -> None:
            claim_flash_directory(directory, self._run_directory)
            register_rank_directory(own_directory, history)
            if self.replicas is not None:
                self.replicas.register(history)

        slots: list[Slots] = []
        try:
            self._rank_group.on_all_ranks(claim)
            # All ranks have restored what they need from it.
            self._rank_group.on_all_ranks(lambda: remove_stale_ranks(directory, history))
            self._rank_group.on_all_ranks(
                lambda: slots.append(Slots(tensors, own_directory, self._callbacks, self._send_replica))
            )
        except (Z2aError, OSError) as error:
            copies = 0 if self.replicas is None else self.replicas.copies
            warn(_no_space_message(directory.parent, 2 * slot_bytes(slot_layout(tensors)), copies, str(error)))
            self._turn_off(directory)
            return Slots(tensors, None, self._callbacks)
        if self.replicas is not None:
            self.replicas.open(slot_bytes(slots[0].shard_specs), self._callbacks.on_replica)
        return slots[0]

    def _turn_off(self, directory: Path) -> None:
        if privacy_problem(directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
        self.directory = None
        if self.replicas is not None:
            self.replicas.close()
            self.replicas = None

    def _send_replica(self, slot: Slot) -> None:
        if self.replicas is not None:
            self.replicas.send(slot)


def _no_space_message(place: Path, size: int, copies: int, error: str) -> str:
    """``size`` is the bytes of two states of one rank; a node also keeps as many ``copies`` times, of other nodes."""
    node_bytes = size * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (1 + copies)
    with_replicas = ", with replicas of other nodes," if copies else ""
    needed = f"{math.ceil(node_bytes / 2**30)}g"
    return (
        f"not enough space for two states of this rank ({show_bytes(size)}) in {place}: {error}; nothing is "
        "kept in memory, and a restart resumes from the last durable checkpoint. "
        f"The ranks of this machine{with_replicas} need {show_bytes(node_bytes)} there: in Docker "
        f"--shm-size={needed} or --ipc=host, in Kubernetes an emptyDir with 'medium: Memory' and a sizeLimit of at "
        f"least that mounted at {place}"
    )
