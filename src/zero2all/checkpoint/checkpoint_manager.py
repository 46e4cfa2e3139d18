"""Saves and restores the training state: in memory every few steps, on durable storage less often."""

from __future__ import annotations

import math
import os
import shutil
import time
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero2all.checkpoint.checkpoint_store import CheckpointStore
from zero2all.checkpoint.dcp_reader import SlotReader
from zero2all.checkpoint.flash import (
    Slot,
    Slots,
    claim_flash_directory,
    drop_abandoned_slots,
    privacy_problem,
    rank_directory,
    register_rank_directory,
    remove_stale_ranks,
    run_in_background,
    slot_bytes,
    slot_layout,
)
from zero2all.checkpoint.rank_group import COLLECTIVE_TIMEOUT, RankGroup
from zero2all.checkpoint.replicas import ReplicaOptions, Replicas
from zero2all.checkpoint.restore import RestoreDecision, decision_summary
from zero2all.checkpoint.restore_point import (
    DamagedStateError,
    RestorePoint,
    RestorePointFinder,
    worst_problems,
)
from zero2all.checkpoint.state_dict import (
    SyncState,
    check_replicas,
    drop_unsaved,
    flatten_tensors,
    load_training_state_dict,
    local_shard,
    replace_tensors,
    rng_state,
    training_state_dict,
    wrap_local_like,
)
from zero2all.checkpoint.training_state import (
    CheckpointCallbacks,
    HistoryRecord,
    Lineage,
    TrainingState,
    extend_lineage,
    new_history_id,
)
from zero2all.console import say, warn
from zero2all.errors import DiskFullError, Z2aError
from zero2all.io import HISTORY_FILE, write_json
from zero2all.units import show_bytes, show_seconds

FAILURE_GRACE = 5.0  # seconds
HEARTBEAT_INTERVAL = 1.0  # seconds between two heartbeats while waiting for storage
LOG_INTERVAL = 60.0  # seconds between two log lines about it


class CheckpointManager:
    """Saves in-memory (flash) and durable checkpoints, and restores the newest valid one.

    >>> flash_dir = flash_directory(SHM_DIRECTORY, key)
    >>> manager = CheckpointManager(checkpoints, flash_dir, run.directory, model, optimizers, RankGroup())
    >>> restore_point = manager.find_restore_point()
    >>> manager.load(restore_point)
    >>> manager.save(20, state, durable=False)   # stalls for one copy
    >>> manager.close("finished")

    Without a flash directory no state survives in memory for a restart, but saving stalls no longer.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        flash_directory: Path | None,
        run_directory: Path,
        model: nn.Module,
        optimizers: list[Optimizer],
        rank_group: RankGroup,
        replica_group: dist.ProcessGroup | None = None,
        callbacks: CheckpointCallbacks | None = None,
        replicas: ReplicaOptions | None = None,
        sync: SyncState | None = None,
    ) -> None:
        """``replica_group`` has the ranks that hold the same state as this one. ``replicas``: those of states in
        memory, on other nodes. ``sync`` is what gradients are synchronized with, if that keeps a state."""
        self.replica_group = replica_group
        self.checkpoints, self.rank_group = checkpoints, rank_group
        self.flash_directory, self.run_directory = flash_directory, run_directory
        self.model, self.optimizers, self.sync = model, optimizers, sync
        self.callbacks = callbacks or CheckpointCallbacks()
        self.lineage = extend_lineage((), 0, rank_group.on_rank0(new_history_id))
        """Lineage of the states saved from now on."""
        self.replicas: Replicas | None = None
        if flash_directory is not None and replicas is not None and replicas.copies > 0:
            self.replicas = Replicas.connect(replicas, flash_directory, rank_group)
        self._damaged: list[DamagedStateError] = []
        self.decision: RestoreDecision | None = None
        """The last decision of ``find_restore_point``."""
        self._slots: Slots | None = None
        self._live_state: dict[str, Any] | None = None  # the live tensors, collected once
        self._live_tensors: dict[str, Tensor] = {}
        self._pending_write: Future[None] | None = None
        self._unwritten_history: HistoryRecord | None = None  # for the run directory, until written there

    # Restoring

    def find_restore_point(self, max_step: float = math.inf) -> RestorePoint | None:
        """The newest state of at most ``max_step`` steps that is valid on all ranks; logs what is skipped."""
        finder = RestorePointFinder(
            self.checkpoints, self.flash_directory, self.run_directory, self.model, self.rank_group, self.replicas,
            tuple(self._damaged),
        )  # fmt: skip
        self.decision, found = finder.find(max_step)
        if found is None and self._damaged:
            raise Z2aError(
                "no valid state is left, and a damaged one has overwritten the weights in memory: move the damaged "
                f"checkpoints out of {self.checkpoints.directory}, and start again from scratch"
            )
        return found

    def begin_history(self, restore_point: RestorePoint | None) -> None:
        """Begin a new history from ``restore_point`` or from scratch; states it does not descend from are abandoned.

        The run directory records it first: a node that is away now may return with states of an abandoned history.
        """
        history = self.rank_group.on_rank0(new_history_id)
        parent, step = ((), 0) if restore_point is None else (restore_point.lineage, restore_point.step)
        self.lineage = extend_lineage(parent, step, history)
        restored = None if self.decision is None else decision_summary(self.decision)
        self._unwritten_history = HistoryRecord(self.lineage, round(time.time(), 3), restored)
        self._write_history()
        if self.flash_directory is not None and privacy_problem(self.flash_directory) is None:
            drop_abandoned_slots(self.flash_directory, self.lineage)
        self.rank_group.on_all_ranks(lambda: None)

    def _write_history(self) -> None:
        """Called on all ranks. A failed write is retried with every durable checkpoint."""
        if self._unwritten_history is None:
            return
        history = asdict(self._unwritten_history)
        try:
            self.rank_group.on_rank0(lambda: write_json(self.run_directory / HISTORY_FILE, history))
            self._unwritten_history = None
        except (Z2aError, OSError) as error:
            warn(
                f"{self.run_directory / HISTORY_FILE} cannot be written: {error}; a restart may take an older "
                "history for the current one; the write is retried with the next durable checkpoint"
            )

    def load(self, restore_point: RestorePoint) -> None:
        """Load a state and begin a history from it, on every rank before any continues.

        Raises ``DamagedStateError`` if its checksums are wrong: then find a different one.
        """
        self._live_state = None
        self.callbacks.on_phase("restore")
        if self.sync is not None:
            self.sync.reset()  # a checkpoint without its state, or with that of other ranks, leaves it so
        if restore_point.slots:
            state = self._state_dict()
            reader = SlotReader(list(restore_point.slots))
            drop_unsaved(state, reader.read_metadata().state_dict_metadata)
            tensors = dict(flatten_tensors(state))
            self.rank_group.on_all_ranks(lambda: reader.load(tensors))  # one that cannot read ends the attempt of all
            load_training_state_dict(state, self.model, self.optimizers)
        else:
            try:
                self.checkpoints.load(restore_point.step, self.model, self.optimizers, self.rank_group, self.sync)
            finally:
                self._finish_verification(restore_point)  # a file that cannot be loaded is usually a damaged one
        self.begin_history(restore_point)
        for slot in self._slots.slots if self._slots is not None else []:
            slot.step = -1 if slot.step > restore_point.step else slot.step

    def _finish_verification(self, restore_point: RestorePoint) -> None:
        """Wait for the checksums that were computed during the load; damage that one rank finds counts for all."""
        verification = restore_point.verification
        if verification is None:
            return
        kind, problems = self.rank_group.gather(verification.result, worst_problems, self.callbacks.on_wait)
        if problems:
            self._damaged.append(DamagedStateError(restore_point.step, problems, kind == "unreadable"))
            raise self._damaged[-1]

    def roll_back(self, max_step: int) -> RestorePoint | None:
        """Load the newest state of at most ``max_step`` steps, and drop all later ones."""
        self.finish_pending_write()
        if self._slots is not None:
            self._slots.wait()
        while (found := self.find_restore_point(max_step)) is not None:
            with suppress(DamagedStateError):  # the next one is an older state
                self.load(found)
                break
        if found is None:
            return None
        if found.slots and not any(step <= found.step for step in self.rank_group.on_rank0(self.checkpoints.steps)):
            # All durable checkpoints are of later steps, and a run must not depend on memory alone.
            state, lineage = self._state_dict(), self.lineage
            self._pending_write = run_in_background(lambda: self._write(found.step, state, found.state, lineage))
            if (error := self._pending_write_error()) is not None:
                warn(f"later checkpoints stay, because the state of step {found.step} cannot be written: {error}")
                return found
        try:
            self.rank_group.on_rank0(lambda: self.checkpoints.remove_after(found.step))
        except (OSError, Z2aError) as error:  # their history is abandoned: they are never restored
            warn(f"checkpoints after step {found.step} cannot be removed: {error}")
        return found

    # Saving

    def save(self, step: int, state: TrainingState, durable: bool) -> float:
        """Stage the state after ``step`` steps; if ``durable``, write it to durable storage in the background.

        Returns the seconds training stalled: one copy, unless an earlier write is still running.
        """
        begin = time.perf_counter()
        if durable and self._pending_write is not None and not self._pending_write.done():
            say("waiting for storage: the previous checkpoint is still being written (a larger checkpoint.every helps)")
        if durable or (self._pending_write is not None and self._pending_write.done()):
            self.finish_pending_write()
        self._collect_live_state()
        assert self._live_state is not None
        lineage = self.lineage
        for name, value in rng_state().items():
            self._live_tensors[f"rng.{name}"].copy_(value)
        if any(map(_is_not_staged, self._live_tensors.values())):
            # Written while training waits, never kept in memory.
            if durable:
                live_state = self._live_state
                self._pending_write = run_in_background(lambda: self._write(step, live_state, state, lineage))
                self._wait_for_write(self._pending_write)
            return time.perf_counter() - begin
        if self.replica_group is not None:
            check_replicas(self._live_tensors, self.replica_group)
        if self.flash_directory is not None:
            self._open_slots()  # memory may be full
        if self.flash_directory is None and not durable:
            return time.perf_counter() - begin  # no benefit, and the only slot may be in use by a write
        slots = self._open_slots()
        slot = slots.stage(step, lineage, self._live_tensors, state, self._may_commit)
        if durable:
            views, live = slots.views(slot), self._live_tensors
            staged = replace_tensors(self._live_state, lambda name: wrap_local_like(live[name], views[name]))
            self._pending_write = slot.reader_future = run_in_background(
                lambda: self._write(step, staged, state, lineage)
            )
        return time.perf_counter() - begin

    def finish_pending_write(self) -> None:
        """Wait for the pending write. A failure costs a checkpoint, not the run: the next one may succeed."""
        if (error := self._pending_write_error()) is not None:
            warn(f"a checkpoint could not be written: {_reason(error)}; training continues, and the next one is tried")

    def wait_until_saved(self) -> None:
        """Wait until everything saved is committed; an error names what is not."""
        if self._slots is not None:
            self._slots.wait()  # if storage fails, the state in memory is the only one
        if (error := self._pending_write_error()) is not None:
            raise Z2aError(
                f"the last checkpoint could not be written: {_reason(error)}; fix that and run the same command again"
            )

    def close(self, outcome: Literal["finished", "stopped", "failed"]) -> None:
        """A finished run drops its states in memory; a failed one gives a pending write a few seconds."""
        if outcome == "failed":
            with suppress(TimeoutError, Exception):
                if self._pending_write is not None:
                    self._pending_write.exception(FAILURE_GRACE)
        else:
            self.wait_until_saved()
        if self.replicas is not None:
            self.replicas.stop_sending()
            if outcome != "failed":  # after a failure other ranks may be gone
                self.rank_group.on_all_ranks(lambda: None)
            self.replicas.close()
        if outcome == "finished" and self.flash_directory is not None:
            self.rank_group.on_all_ranks(lambda: None)
            shutil.rmtree(self.flash_directory, ignore_errors=True)

    def _may_commit(self) -> bool:
        return self.rank_group.rank != 0 or self.callbacks.before_commit()

    def _write(self, step: int, staged: dict[str, Any], state: TrainingState, lineage: Lineage) -> None:
        begin = time.perf_counter()
        if not self._may_commit():  # the checkpoint is worth more than the record
            warn(
                f"the run record has not caught up with the checkpoint of step {step}: a restart may leave a gap in it"
            )
        self._write_history()  # first: a restart may skip a checkpoint of an unrecorded history
        self.checkpoints.write(step, staged, state, lineage, self.rank_group, self.callbacks)
        self.callbacks.on_saved(step, time.perf_counter() - begin)

    def _pending_write_error(self) -> Exception | None:
        """Wait for the pending write and return its error."""
        pending, self._pending_write = self._pending_write, None
        error = None if pending is None else self._wait_for_write(pending)
        if error is not None and not isinstance(error, Z2aError | OSError):
            raise error
        return error

    def _wait_for_write(self, write: Future[None]) -> BaseException | None:
        """Wait for a write, sending heartbeats; these end at a time-out, since storage itself may hang."""
        started = time.monotonic()
        log_at = LOG_INTERVAL
        while True:
            with suppress(TimeoutError):
                return write.exception(HEARTBEAT_INTERVAL)
            waited = time.monotonic() - started
            if waited < COLLECTIVE_TIMEOUT.total_seconds():
                self.callbacks.on_wait()
            if waited >= log_at:
                say(f"still waiting for storage, for {show_seconds(waited)} so far")
                log_at = waited + LOG_INTERVAL

    def _collect_live_state(self) -> None:
        """Collect the live tensors once the optimizer has its state, and again after a load has replaced them."""
        if self._live_state is None:
            self._live_state = self._state_dict()
            self._live_tensors = dict(flatten_tensors(self._live_state))

    def _state_dict(self) -> dict[str, Any]:
        return training_state_dict(self.model, self.optimizers, self.sync)

    def _open_slots(self) -> Slots:
        if self._slots is None:
            self._slots = self._make_slots(self._live_tensors)
        return self._slots

    def _make_slots(self, tensors: dict[str, Tensor]) -> Slots:
        if self.flash_directory is None:
            return Slots(tensors, None, self.callbacks)
        directory, history = self.flash_directory, self.lineage[-1].history
        own_directory = rank_directory(directory, self.rank_group.rank, self.rank_group.world_size)

        def claim() -> None:
            claim_flash_directory(directory, self.run_directory)
            register_rank_directory(own_directory, history)
            if self.replicas is not None:
                self.replicas.register(history)

        slots: list[Slots] = []
        try:
            self.rank_group.on_all_ranks(claim)
            # All ranks have restored what they need from it.
            self.rank_group.on_all_ranks(lambda: remove_stale_ranks(directory, history))
            self.rank_group.on_all_ranks(
                lambda: slots.append(Slots(tensors, own_directory, self.callbacks, self._send_replica))
            )
        except (Z2aError, OSError) as error:
            copies = 0 if self.replicas is None else self.replicas.copies
            warn(_no_space_message(directory.parent, 2 * slot_bytes(slot_layout(tensors)), copies, str(error)))
            if privacy_problem(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)
            self.flash_directory = None
            if self.replicas is not None:
                self.replicas.close()
                self.replicas = None
            return Slots(tensors, None, self.callbacks)
        if self.replicas is not None:
            self.replicas.open(slot_bytes(slots[0].shard_specs), self.callbacks.on_replica)
        return slots[0]

    def _send_replica(self, slot: Slot) -> None:
        if self.replicas is not None:
            self.replicas.send(slot)


def _reason(error: Exception) -> str:
    """Without the advice to run the command again: the run continues."""
    return error.reason if isinstance(error, DiskFullError) else str(error)


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


def _is_not_staged(tensor: Tensor) -> bool:
    """Quantized optimizer state is not plain bytes; state in files (parallel.offload) need not fit into memory."""
    shard = local_shard(tensor)
    return type(shard) is not Tensor or shard.untyped_storage().filename is not None
