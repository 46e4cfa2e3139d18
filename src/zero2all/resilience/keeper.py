"""What a running job keeps of its state: in memory every few steps, on durable storage every so many more."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from zero2all.console import say, warn
from zero2all.errors import Z2aError
from zero2all.io import write_json
from zero2all.resilience.checkpoint import STATE, Checkpoints
from zero2all.resilience.condition import GONE, DamagedError, glance, patiently, worst
from zero2all.resilience.flash import (
    Slots,
    Staged,
    claim,
    cut,
    forget_abandoned,
    in_background,
    layout_of,
    occupy,
    remove_stale,
    size_of,
    staged_in,
    why_not_private,
)
from zero2all.resilience.lineage import HISTORY, UNKNOWN, Lineage, descend, from_json, new_history, read_line, to_json
from zero2all.resilience.replicas import compare_copies
from zero2all.resilience.restore import (
    SHOWN,
    Chosen,
    Decision,
    DurableReport,
    RankReport,
    SlotReport,
    decide,
    summary,
)
from zero2all.resilience.slot_reader import SlotReader
from zero2all.resilience.state import like, local, put_state, rng_state, state_of, tensors_in, with_tensors
from zero2all.resilience.team import PATIENCE, Team
from zero2all.units import show_bytes, show_seconds

GRACE = 5.0  # seconds
SIGN = 1.0  # seconds between two heartbeats while storage is waited for
SAY = 60.0  # seconds between two lines that say so


@dataclass(frozen=True)
class Found:
    """A valid state to resume from. ``slots`` are what this rank reads of it; none means the durable checkpoint."""

    step: int
    state: dict[str, Any]
    lineage: Lineage
    slots: tuple[Staged, ...] = ()

    @property
    def where(self) -> str:
        return "in memory" if self.slots else "on durable storage"


class Keeper:
    """
    >>> keeper = Keeper(checkpoints, flash_directory(PLACE, key), run.directory, model, optimizers, Team())
    >>> found = keeper.newest()
    >>> keeper.load(found)
    >>> keeper.save(20, state, durable=False)   # stalls for one copy
    >>> keeper.close()

    Without a directory nothing is kept in memory for a restart, but saving is just as short.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        directory: Path | None,
        run: Path,
        model: nn.Module,
        optimizers: list[Optimizer],
        team: Team,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        """``copies`` are the ranks that hold the same as this one."""
        self.copies = copies
        self.checkpoints, self.directory, self.run, self.team = checkpoints, directory, run, team
        self.model, self.optimizers = model, optimizers
        self.on_saved: Callable[[int, float], None] = lambda step, seconds: None
        self.on_wait: Callable[[], None] = lambda: None
        """Called every second while training waits for storage: a heartbeat, or that would look like a hang."""
        self.before_commit: Callable[[], bool] = lambda: True
        """Whether a state may count, asked in the background: not while the run record lags behind it.

        Only the first rank asks: its record is the run's, and each refusal of one rank costs all a common state.
        """
        self.lineage = descend((), 0, team.first(new_history))
        """Of the states that are saved from now on."""
        self.decision: Decision | None = None
        """What ``newest`` decided last."""
        self._slots: Slots | None = None
        self._state: dict[str, Any] | None = None  # the live tensors, collected once
        self._tensors: dict[str, Tensor] = {}
        self._persist: Future[None] | None = None
        self._note: dict[str, Any] | None = None  # for the run directory, as long as it is not written there

    # Restoring

    def newest(self, at_most: float = math.inf) -> Found | None:
        """The newest state that is valid on all ranks, as ``restore.decide`` has it; what is skipped is said."""
        mine = self._staged()
        durable, line = self.team.first(self._durable), self.team.first(self._line)
        while True:
            ranks = self.team.together(lambda: RankReport(tuple(mine)))
            decision = decide(ranks, durable, line, at_most)
            # Checksums are computed of what would be restored alone: a state is as large as the memory.
            if decision.chosen is None or self._is_valid(decision.chosen, mine, durable):
                break
        for rejected in decision.rejected:
            warn(str(rejected))
        self.decision, chosen = decision, decision.chosen
        if chosen is None:
            return None
        if chosen.where == "durable":
            state = self.team.first(lambda: self.checkpoints.state(chosen.step))  # one that fails, fails for all
            return Found(chosen.step, state, chosen.lineage)
        slots = tuple(mine[report] for report in chosen.sources[self.team.rank])
        return Found(chosen.step, slots[0].state, chosen.lineage, slots)

    def _staged(self) -> dict[SlotReport, Staged]:
        """What lies in the memory of this machine."""
        if self.directory is None:
            return {}
        if (reason := why_not_private(self.directory)) is not None:
            warn(f"{reason}: it is not used, and a restart begins at the last durable checkpoint")
            return {}
        layout = layout_of(cut(dict(tensors_in({"model": get_model_state_dict(self.model)}))))
        once: dict[Lineage | None, Lineage | None] = {}  # sent to all ranks: one object is pickled once
        return {
            SlotReport(
                rank=slot.rank,
                world=slot.world,
                step=slot.step,
                lineage=once.setdefault(slot.lineage, slot.lineage),
                fits=slot.layout == layout,
                problem=f"{slot.data.name} was not finished" if slot.hash is None else None,
            ): slot
            for slot in staged_in(self.directory)
        }

    def _durable(self) -> list[DurableReport]:
        return [self._report(step) for step in self.checkpoints.steps()]

    def _report(self, step: int) -> DurableReport:
        path, read = self.checkpoints.path(step), list[Lineage]()
        condition = patiently(lambda: read.append(self._lineage_of(step)))
        if condition.kind == "valid":
            return DurableReport(str(path), step, read[0])
        seen = glance(path, step)  # names the file that is missing or cut short
        if seen.kind == "damaged":
            condition = seen
        return DurableReport(str(path), step, None, (condition.reason,), condition.kind == "unreadable")

    def _lineage_of(self, step: int) -> Lineage:
        try:
            saved = self.checkpoints.state(step).get("lineage")
            return UNKNOWN if saved is None else from_json(saved)
        except GONE:
            raise DamagedError(f"{STATE} is missing") from None
        except Z2aError as error:
            if isinstance(error.__cause__, ValueError):  # it was read, and says nothing
                raise DamagedError(str(error)) from error
            raise

    def _line(self) -> Lineage | None:
        try:
            return read_line(self.run)
        except (OSError, Z2aError) as error:
            warn(f"the newest durable checkpoint decides which history is the current one: {error}")
            return None

    def _is_valid(self, chosen: Chosen, mine: dict[SlotReport, Staged], durable: list[DurableReport]) -> bool:
        """Whether no rank finds fault with its part; what it finds is added to the reports.

        Damage that one rank sees is damage; where some ranks merely cannot read, nobody knows.
        """
        if chosen.where == "memory":
            bad = {}
            for report in chosen.sources[self.team.rank]:
                if (problem := mine[report].problem()) is not None:
                    bad[report] = f"{mine[report].data.name} {problem}"
            for report, problem in bad.items():
                mine[replace(report, problem=problem)] = mine.pop(report)
            return not any(self.team.together(lambda: bool(bad)))
        share = (self.team.rank, self.team.world)
        found = self.team.together(lambda: self.checkpoints.examine(chosen.step, share))
        kind = worst(found).kind
        problems = [
            f"{condition.reason} (rank {rank})" if self.team.world > 1 else condition.reason
            for rank, condition in enumerate(found)
            if condition.kind == kind != "valid"
        ][:SHOWN]
        [at] = [number for number, report in enumerate(durable) if report.step == chosen.step]
        durable[at] = replace(durable[at], problems=tuple(problems), unreadable=kind == "unreadable")
        return not problems

    def begin(self, found: Found | None) -> None:
        """Begin a new history from ``found``, or from scratch; what it does not descend from counts no more.

        The run directory says so first: a node that is away now may come back with states of an abandoned history.
        """
        history = self.team.first(new_history)
        self.lineage = descend((), 0, history) if found is None else descend(found.lineage, found.step, history)
        restored = None if self.decision is None else summary(self.decision)
        self._note = {"lineage": to_json(self.lineage), "time": round(time.time(), 3), "restored": restored}
        self._write_note()
        if self.directory is not None and why_not_private(self.directory) is None:
            forget_abandoned(self.directory, self.lineage)
        self.team.together(lambda: None)

    def _write_note(self) -> None:
        """All ranks together. What fails is tried again with every durable checkpoint, until the note is there."""
        if self._note is None:
            return
        note = self._note
        try:
            self.team.first(lambda: write_json(self.run / HISTORY, note))
            self._note = None
        except (Z2aError, OSError) as error:
            warn(
                f"{self.run / HISTORY} cannot be written: {error}; a restart may take an older history for the current "
                "one; it is tried again with the next durable checkpoint"
            )

    def load(self, found: Found) -> None:
        """Put a state back and begin a history from it, on every rank before any goes on."""
        self._state = None
        if found.slots:
            state = state_of(self.model, self.optimizers)
            reader = SlotReader(list(found.slots))
            known = reader.read_metadata().state_dict_metadata
            state["rng"] = {name: value for name, value in state["rng"].items() if f"rng.{name}" in known}
            tensors = dict(tensors_in(state))
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
            put_state(state, self.model, self.optimizers)
        else:
            self.checkpoints.load(found.step, self.model, self.optimizers)
        self.begin(found)
        for slot in self._slots.slots if self._slots is not None else []:
            slot.step = -1 if slot.step > found.step else slot.step

    def roll_back(self, at_most: int) -> Found | None:
        """Load the newest state of no more than so many steps, and keep none of a later one."""
        self.settle()
        if self._slots is not None:
            self._slots.wait()
        found = self.newest(at_most)
        if found is None:
            return None
        self.load(found)
        if found.slots and not any(step <= found.step for step in self.team.first(self.checkpoints.steps)):
            # All that is durable is of later steps, and a run must not hang on memory alone.
            state, lineage = state_of(self.model, self.optimizers), self.lineage
            self._persist = in_background(lambda: self._write(found.step, state, found.state, lineage))
            if (error := self._outcome()) is not None:
                warn(f"checkpoints of later steps stay, for the state of step {found.step} cannot be written: {error}")
                return found
        try:
            self.team.first(lambda: self.checkpoints.remove_after(found.step))
        except (OSError, Z2aError) as error:  # they are of an abandoned history, and not restored
            warn(f"checkpoints after step {found.step} cannot be removed: {error}")
        return found

    # Keeping

    def save(self, step: int, state: dict[str, Any], durable: bool) -> float:
        """Stage the state of ``step`` steps done, and write it to durable storage in the background if asked to.

        Returns the seconds for which training stood still: one copy, unless an earlier write is still going on.
        """
        begin = time.perf_counter()
        if durable and self._persist is not None and not self._persist.done():
            say("waiting for storage: the previous checkpoint is still being written (a larger checkpoint.every helps)")
        if durable or (self._persist is not None and self._persist.done()):
            self.settle()
        self._collect()
        assert self._state is not None
        lineage = self.lineage
        for name, value in rng_state().items():
            self._tensors[f"rng.{name}"].copy_(value)
        if any(type(local(tensor)) is not Tensor for tensor in self._tensors.values()):
            # Quantised optimizer state is no plain bytes: it is written while training waits, and never kept in memory.
            if durable:
                whole = self._state
                self._persist = in_background(lambda: self._write(step, whole, state, lineage))
                self._wait_for(self._persist)
            return time.perf_counter() - begin
        if self.copies is not None:
            compare_copies(self._tensors, self.copies)
        if self.directory is not None:
            self._open()  # there may be no room
        if self.directory is None and not durable:
            return time.perf_counter() - begin  # nothing to gain from it, and the only copy may be being written
        slots = self._open()
        slot = slots.stage(step, lineage, self._tensors, state, self._may_commit)
        if durable:
            views, live = slots.views(slot), self._tensors
            staged = with_tensors(self._state, lambda name: like(live[name], views[name]))
            self._persist = slot.reader = in_background(lambda: self._write(step, staged, state, lineage))
        return time.perf_counter() - begin

    def settle(self) -> None:
        """Until nothing is being written. What failed costs a checkpoint, not the run: the next one may succeed."""
        if (error := self._outcome()) is not None:
            warn(f"a checkpoint could not be written: {error}; training goes on, and the next one is tried")

    def wait(self) -> None:
        """Until all that was saved is where it should be, or an error that says what is not."""
        if self._slots is not None:
            self._slots.wait()  # where storage fails, the state in memory is all there is
        if (error := self._outcome()) is not None:
            raise Z2aError(
                f"the last checkpoint could not be written: {error}; mend that and run the same command again"
            )

    def close(self, outcome: Literal["finished", "stopped", "failed"]) -> None:
        """A run that is finished needs no state in memory any more; one that failed gives a write a few seconds."""
        if outcome == "failed":
            with suppress(TimeoutError, Exception):
                if self._persist is not None:
                    self._persist.exception(GRACE)
        else:
            self.wait()
        if outcome == "finished" and self.directory is not None:
            self.team.together(lambda: None)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _may_commit(self) -> bool:
        return self.team.rank != 0 or self.before_commit()

    def _write(self, step: int, staged: dict[str, Any], state: dict[str, Any], lineage: Lineage) -> None:
        begin = time.perf_counter()
        if not self._may_commit():  # the checkpoint is worth more than the record
            warn(
                f"the run record has not caught up with the checkpoint of step {step}: a restart may leave a gap in it"
            )
        self._write_note()  # first, for a checkpoint of a history that is not noted may be skipped by a restart
        self.checkpoints.write(step, staged, {**state, "lineage": to_json(lineage)}, self.team)
        self.on_saved(step, time.perf_counter() - begin)

    def _outcome(self) -> Exception | None:
        """The outcome of the write under way, once it is over."""
        persist, self._persist = self._persist, None
        error = None if persist is None else self._wait_for(persist)
        if error is not None and not isinstance(error, Z2aError | OSError):
            raise error
        return error

    def _wait_for(self, write: Future[None]) -> BaseException | None:
        """The outcome of a write, with heartbeats until then; but not for ever, since storage itself may hang."""
        began = time.monotonic()
        say_at = SAY
        while True:
            with suppress(TimeoutError):
                return write.exception(SIGN)
            waited = time.monotonic() - began
            if waited < PATIENCE.total_seconds():
                self.on_wait()
            if waited >= say_at:
                say(f"still waiting for storage, for {show_seconds(waited)} so far")
                say_at = waited + SAY

    def _collect(self) -> None:
        """The live tensors, once the optimizer has its state, and anew after a load has replaced them."""
        if self._state is None:
            self._state = state_of(self.model, self.optimizers)
            self._tensors = dict(tensors_in(self._state))

    def _open(self) -> Slots:
        if self._slots is None:
            self._slots = self._make_slots(self._tensors)
        return self._slots

    def _make_slots(self, tensors: dict[str, Tensor]) -> Slots:
        if self.directory is None:
            return Slots(tensors, None)
        directory, history = self.directory, self.lineage[-1].history
        own = directory / f"rank-{self.team.rank}-of-{self.team.world}"

        def move_in() -> None:
            claim(directory, self.run)
            occupy(own, history)

        made: list[Slots] = []
        try:
            self.team.together(move_in)
            self.team.together(lambda: remove_stale(directory, history))  # all have restored what they needed of it
            self.team.together(lambda: made.append(Slots(tensors, own)))
        except (Z2aError, OSError) as error:
            warn(_no_room(directory.parent, 2 * size_of(cut(tensors)), str(error)))
            if why_not_private(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)
            self.directory = None
            return Slots(tensors, None)
        return made[0]


def _no_room(place: Path, size: int, error: str) -> str:
    """``size`` is of two states of one rank."""
    here = size * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = f"{math.ceil(here / 2**30)}g"
    return (
        f"no room for two states of this rank ({show_bytes(size)}) in {place}: {error}; nothing is kept in memory, "
        "and a restart begins at the last durable checkpoint. "
        f"The ranks of this machine need {show_bytes(here)} there: in Docker --shm-size={needed} or --ipc=host, in "
        f"Kubernetes an emptyDir with 'medium: Memory' and a sizeLimit of at least that mounted at {place}"
    )
