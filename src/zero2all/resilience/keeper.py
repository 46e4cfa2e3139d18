"""What a running job keeps of its state: in memory every few steps, on durable storage every so many more."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from zero2all.console import say, warn
from zero2all.errors import Z2aError
from zero2all.resilience.checkpoint import Checkpoints
from zero2all.resilience.flash import (
    SlotReader,
    Slots,
    Staged,
    claim,
    cut,
    forget_staged,
    in_background,
    layout_of,
    size_of,
    staged_in,
)
from zero2all.resilience.replicas import compare_copies
from zero2all.resilience.state import like, local, put_state, rng_state, state_of, tensors_in, with_tensors
from zero2all.resilience.team import Team
from zero2all.units import show_bytes

GRACE = 5.0  # seconds


@dataclass(frozen=True)
class Found:
    """A whole state to go on from. ``slots`` are what this rank reads of it; none means the durable checkpoint."""

    step: int
    state: dict[str, Any]
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
        self.before_commit: Callable[[], Any] = lambda: None
        self._slots: Slots | None = None
        self._state: dict[str, Any] | None = None  # the live tensors, collected once
        self._tensors: dict[str, Tensor] = {}
        self._persist: Future[None] | None = None

    # Going on

    def newest(self, at_most: float = math.inf) -> Found | None:
        """The newest state that is whole on all ranks; what is damaged is passed over aloud."""
        durable = self.team.first(self.checkpoints.steps)
        flash = self._in_memory()
        for step in sorted({*durable, *flash}, reverse=True):
            if step > at_most:
                continue
            if step in flash and self._agree(f"the state of step {step} in memory", _problems(flash[step])):
                return Found(step, flash[step][0].state, tuple(flash[step]))
            if step in durable:
                share = (self.team.rank, self.team.world)
                problem = self.checkpoints.problem(step, share)
                if self._agree(f"checkpoint {self.checkpoints.path(step)}", [problem] if problem else []):
                    return Found(step, self.checkpoints.state(step))
        return None

    def load(self, found: Found) -> None:
        """Put a state back. What was kept of later steps is forgotten, on every rank before any goes on."""
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
        if self.directory is not None:
            forget_staged(self.directory, found.step)
        for slot in self._slots.slots if self._slots is not None else []:
            slot.step = -1 if slot.step > found.step else slot.step
        self.team.together(lambda: None)

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
            try:
                self.checkpoints.write(found.step, state_of(self.model, self.optimizers), found.state, self.team)
            except (Z2aError, OSError) as error:
                warn(f"checkpoints of later steps stay, for the state of step {found.step} cannot be written: {error}")
                return found
        self.team.first(lambda: self.checkpoints.remove_after(found.step))
        return found

    def _in_memory(self) -> dict[int, list[Staged]]:
        """By step the slots that this rank would read, where every rank can read what it needs."""
        if self.directory is None:
            return {}
        slots = staged_in(self.directory)
        layout = layout_of(cut(dict(tensors_in({"model": get_model_state_dict(self.model)}))))
        torn = [slot.step for slot in slots if slot.hash is None and slot.rank == self.team.rank]
        for rank, steps in enumerate(self.team.together(lambda: torn)):
            for step in steps:
                warn(f"the state of step {step} in memory is passed over: rank {rank} did not finish it")
        mine: dict[int, list[Staged]] = {}
        for step in {slot.step for slot in slots if slot.hash is not None}:
            there = [slot for slot in slots if slot.step == step and slot.hash is not None]
            own = [slot for slot in there if (slot.rank, slot.world) == (self.team.rank, self.team.world)]
            if own and own[0].layout == layout:
                mine[step] = own
            elif len({slot.rank for slot in there if slot.world == there[0].world}) == there[0].world:
                mine[step] = [slot for slot in there if slot.world == there[0].world]
        common = set.intersection(*(set(steps) for steps in self.team.together(lambda: list(mine))))
        return {step: mine[step] for step in common}

    def _agree(self, what: str, problems: list[str]) -> bool:
        found = [
            f"{problem} (rank {rank})" if self.team.world > 1 else problem
            for rank, reasons in enumerate(self.team.together(lambda: problems))
            for problem in reasons
        ]
        if found:
            warn(f"{what} is passed over: {'; '.join(found)}")
        return not found

    # Keeping

    def save(self, step: int, state: dict[str, Any], durable: bool) -> float:
        """Stage the state of ``step`` steps done, and write it to durable storage in the background if asked to.

        Returns the seconds for which training stood still: one copy, unless an earlier write is still going on.
        """
        begin = time.perf_counter()
        if durable and self._persist is not None and not self._persist.done():
            say("the checkpoint before is still being written; waiting for it (a larger checkpoint.every would not)")
        if durable or (self._persist is not None and self._persist.done()):
            self.settle()
        self._collect()
        assert self._state is not None
        for name, value in rng_state().items():
            self._tensors[f"rng.{name}"].copy_(value)
        if any(type(local(tensor)) is not Tensor for tensor in self._tensors.values()):
            # Quantised optimizer state is no plain bytes: it is written while training waits, and never kept in memory.
            if durable:
                whole = self._state
                self._persist = in_background(lambda: self._write(step, whole, state))
                self._persist.exception()
            return time.perf_counter() - begin
        if self.copies is not None:
            compare_copies(self._tensors, self.copies)
        slots = self._open()
        slot = slots.stage(step, self._tensors, state, self.before_commit)
        if durable:
            views, live = slots.views(slot), self._tensors
            staged = with_tensors(self._state, lambda name: like(live[name], views[name]))
            self._persist = slot.reader = in_background(lambda: self._write(step, staged, state))
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

    def _write(self, step: int, staged: dict[str, Any], state: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self.checkpoints.write(step, staged, state, self.team)
        self.on_saved(step, time.perf_counter() - begin)

    def _outcome(self) -> Exception | None:
        """The outcome of the write under way, once it is over."""
        persist, self._persist = self._persist, None
        error = None if persist is None else persist.exception()
        if error is not None and not isinstance(error, Z2aError | OSError):
            raise error
        return error

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
        directory = self.directory

        def make() -> Slots:
            claim(directory, self.run)
            return Slots(tensors, directory / f"rank-{self.team.rank}-of-{self.team.world}")

        made: list[Slots] = []
        try:
            self.team.together(lambda: made.append(make()))
        except (Z2aError, OSError) as error:
            size = show_bytes(2 * size_of(cut(tensors)))
            warn(
                f"no room for two states of this rank ({size}) in {directory.parent}: {error}; they are staged in the "
                "process's own memory instead, so a restart begins at the last durable checkpoint"
            )
            shutil.rmtree(directory, ignore_errors=True)
            self.directory = None
            return Slots(tensors, None)
        return made[0]


def _problems(slots: list[Staged]) -> list[str]:
    return [f"{slot.data.name} {problem}" for slot in slots if (problem := slot.problem()) is not None]
