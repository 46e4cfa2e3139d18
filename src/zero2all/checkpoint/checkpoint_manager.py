"""Saves and restores the training state: in memory every few steps, on durable storage less often."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zero2all.base.console import say, warn
from zero2all.base.errors import DiskFullError, Z2aError
from zero2all.checkpoint.checkpoint_store import CheckpointStore
from zero2all.checkpoint.dcp_reader import SlotReader
from zero2all.checkpoint.live_state import CheckpointedModel, LiveState
from zero2all.checkpoint.memory_tier import MemoryTier
from zero2all.checkpoint.pending_write import PendingWrite
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.replicas import ReplicaOptions
from zero2all.checkpoint.restore import RestoreDecision
from zero2all.checkpoint.restore_point import DamagedStateError, RestorePoint, RestorePointFinder, worst_problems
from zero2all.checkpoint.run_history import RunHistory
from zero2all.checkpoint.state_dict import check_replicas, drop_unsaved, flatten_tensors, load_training_state_dict
from zero2all.checkpoint.training_state import CheckpointCallbacks, TrainingState


@dataclass(frozen=True)
class CheckpointPlaces:
    """The places where the states of a run are kept."""

    checkpoints: CheckpointStore
    run_directory: Path
    flash_directory: Path | None = None
    """Directory of states in memory. Without it a restart finds none, but saving stalls no longer."""
    replicas: ReplicaOptions | None = None
    """Replicas of states in memory on other nodes."""


class CheckpointManager:
    """Saves in-memory (flash) and durable checkpoints, and restores the newest valid one.

    >>> places = CheckpointPlaces(run.checkpoints, run.directory, flash_directory(SHM_DIRECTORY, key))
    >>> manager = CheckpointManager(places, CheckpointedModel(model, optimizers), RankGroup())
    >>> restore_point = manager.find_restore_point()
    >>> manager.load(restore_point)
    >>> manager.save(20, state, durable=False)   # stalls for one copy
    >>> manager.close("finished")
    """

    def __init__(
        self,
        places: CheckpointPlaces,
        trained: CheckpointedModel,
        rank_group: RankGroup,
        callbacks: CheckpointCallbacks | None = None,
    ) -> None:
        self.checkpoints, self.run_directory = places.checkpoints, places.run_directory
        self.trained, self.rank_group = trained, rank_group
        self.callbacks = callbacks or CheckpointCallbacks()
        self.history = RunHistory(places.run_directory, rank_group)
        self.memory = MemoryTier(
            places.flash_directory, places.run_directory, places.replicas, rank_group, self.callbacks
        )
        self.decision: RestoreDecision | None = None
        """The last decision of ``find_restore_point``."""
        self._damaged: list[DamagedStateError] = []
        self._live: LiveState | None = None  # collected again after a load, which replaces the tensors
        self._pending = PendingWrite(self.callbacks.on_wait)

    # Restoring

    def find_restore_point(self, max_step: float = math.inf) -> RestorePoint | None:
        """The newest state of at most ``max_step`` steps that is valid on all ranks; logs what is skipped."""
        finder = RestorePointFinder(
            self.checkpoints,
            self.memory.directory,
            self.run_directory,
            self.trained.model,
            self.rank_group,
            self.memory.replicas,
            tuple(self._damaged),
        )
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
        parent, step = ((), 0) if restore_point is None else (restore_point.lineage, restore_point.step)
        self.history.begin(parent, step, self.decision)
        self.memory.drop_abandoned(self.history.lineage)
        self.rank_group.on_all_ranks(lambda: None)

    def load(self, restore_point: RestorePoint) -> None:
        """Load a state and begin a history from it, on every rank before any continues.

        Raises ``DamagedStateError`` if its checksums are wrong: then find a different one.
        """
        self._live = None
        self.callbacks.on_phase("restore")
        trained = self.trained
        if trained.sync is not None:
            trained.sync.reset()  # it stays so if the checkpoint has no state of it, or one of other ranks
        if restore_point.slots:
            self._load_slots(SlotReader(list(restore_point.slots)))
        else:
            step = restore_point.step
            try:
                self.checkpoints.load(step, trained.model, trained.optimizers, self.rank_group, trained.sync)
            finally:
                self._finish_verification(restore_point)  # a file that cannot be loaded is usually a damaged one
        self.begin_history(restore_point)
        self.memory.discard_after(restore_point.step)

    def _load_slots(self, reader: SlotReader) -> None:
        state = self.trained.state_dict()
        drop_unsaved(state, reader.read_metadata().state_dict_metadata)
        tensors = dict(flatten_tensors(state))
        self.rank_group.on_all_ranks(lambda: reader.load(tensors))  # one that cannot read ends the attempt of all
        load_training_state_dict(state, self.trained.model, self.trained.optimizers)

    def _finish_verification(self, restore_point: RestorePoint) -> None:
        """Wait for the checksums that were computed during the load; damage that one rank finds counts for all."""
        verification = restore_point.verification
        if verification is None:
            return
        kind, problems = self.rank_group.gather(verification.result, worst_problems, self.callbacks.on_wait)
        if problems:
            self._damaged.append(DamagedStateError(restore_point.step, problems, unreadable=kind == "unreadable"))
            raise self._damaged[-1]

    def roll_back(self, max_step: int) -> RestorePoint | None:
        """Load the newest state of at most ``max_step`` steps, and drop all later ones."""
        self.finish_pending_write()
        self.memory.wait()
        while (found := self.find_restore_point(max_step)) is not None:
            with suppress(DamagedStateError):  # the next one is an older state
                self.load(found)
                break
        if found is None:
            return None
        if found.slots and not any(step <= found.step for step in self.rank_group.on_rank0(self.checkpoints.steps)):
            # All durable checkpoints are of later steps, and a run must not depend on memory alone.
            self._start_write(found.step, self.trained.state_dict(), found.state)
            if (error := self._pending.take_error()) is not None:
                warn(f"later checkpoints stay, because the state of step {found.step} cannot be written: {error}")
                return found
        try:
            self.rank_group.on_rank0(lambda: self.checkpoints.remove_after(found.step))
        except (OSError, Z2aError) as error:  # their history is abandoned: they are never restored
            warn(f"checkpoints after step {found.step} cannot be removed: {error}")
        return found

    # Saving

    def save(self, step: int, state: TrainingState, *, durable: bool) -> float:
        """Stage the state after ``step`` steps; if ``durable``, write it to durable storage in the background.

        Returns the seconds training stalled: one copy, unless an earlier write is still running.
        """
        begin = time.perf_counter()
        is_writing = self._pending.is_running()
        if durable and is_writing:
            say("waiting for storage: the previous checkpoint is still being written (a larger checkpoint.every helps)")
        if durable or not is_writing:
            self.finish_pending_write()
        if self._live is None:
            self._live = LiveState(self.trained)
        self._live.update_rng()
        if self._live.can_be_staged():
            self._stage(step, self._live, state, durable=durable)
        elif durable:  # written while training waits, never kept in memory
            self._start_write(step, self._live.nested, state)
            self._pending.wait()
        return time.perf_counter() - begin

    def _stage(self, step: int, live: LiveState, state: TrainingState, *, durable: bool) -> None:
        if self.trained.replica_group is not None:
            check_replicas(live.tensors, self.trained.replica_group)
        lineage = self.history.lineage
        if self.memory.directory is not None:
            self.memory.open_slots(live.tensors, lineage[-1].history)  # memory may be full
        if self.memory.directory is None and not durable:
            return  # no benefit, and the only slot may be in use by a write
        slots = self.memory.open_slots(live.tensors, lineage[-1].history)
        slot = slots.stage(step, lineage, live.tensors, state, self._may_commit)
        if durable:
            slot.reader_future = self._start_write(step, live.with_shards(slots.views(slot)), state)

    def finish_pending_write(self) -> None:
        """Wait for the pending write. A failure costs a checkpoint, not the run: the next one may succeed."""
        if (error := self._pending.take_error()) is not None:
            warn(f"a checkpoint could not be written: {_reason(error)}; training continues, and the next one is tried")

    def wait_until_saved(self) -> None:
        """Wait until everything saved is committed; an error names what is not."""
        self.memory.wait()  # if storage fails, the state in memory is the only one
        if (error := self._pending.take_error()) is not None:
            raise Z2aError(
                f"the last checkpoint could not be written: {_reason(error)}; fix that and run the same command again"
            )

    def close(self, outcome: Literal["finished", "stopped", "failed"]) -> None:
        """A finished run drops its states in memory; a failed one gives a pending write a few seconds."""
        if outcome == "failed":
            self._pending.wait_briefly()
        else:
            self.wait_until_saved()
        self.memory.close(has_failed=outcome == "failed")
        if outcome == "finished":
            self.memory.remove()

    def _may_commit(self) -> bool:
        return self.rank_group.rank != 0 or self.callbacks.before_commit()

    def _start_write(self, step: int, tensors: dict[str, Any], state: TrainingState) -> Future[None]:
        """Write a durable checkpoint in the background: ``tensors`` must keep their values until it is written."""
        lineage = self.history.lineage

        def write() -> None:
            begin = time.perf_counter()
            if not self._may_commit():  # the checkpoint is worth more than the record
                warn(
                    f"the run record has not caught up with the checkpoint of step {step}: a restart may leave a gap "
                    "in it"
                )
            self.history.write()  # first: a restart may skip a checkpoint of an unrecorded history
            self.checkpoints.write(step, tensors, state, lineage, self.rank_group, self.callbacks)
            self.callbacks.on_saved(step, time.perf_counter() - begin)

        return self._pending.start(write)


def _reason(error: Exception) -> str:
    """The reason without the advice to run the command again, since the run continues."""
    return error.reason if isinstance(error, DiskFullError) else str(error)
