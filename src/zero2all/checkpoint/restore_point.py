"""Finds the state to restore: what each rank holds in memory, what is on durable storage, and which of it is valid."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from zero2all.checkpoint.checkpoint_store import STATE_FILE, CheckpointStore
from zero2all.checkpoint.flash import (
    StagedSlot,
    find_staged_slots,
    layout_fingerprint,
    privacy_problem,
    slot_layout,
)
from zero2all.checkpoint.integrity import (
    MISSING_FILE_ERRORS,
    DamagedError,
    check_with_retries,
    verify_sizes,
    worst_result,
)
from zero2all.checkpoint.lineage import UNKNOWN_LINEAGE, Lineage, read_lineage
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.restore import (
    MAX_RANKS_IN_REASON,
    DurableReport,
    RankReport,
    RestoreChoice,
    RestoreDecision,
    SlotReport,
    decide_restore,
)
from zero2all.checkpoint.state_dict import flatten_tensors
from zero2all.checkpoint.training_state import TrainingState
from zero2all.console import warn
from zero2all.errors import Z2aError


@dataclass(frozen=True)
class RestorePoint:
    """A valid state to resume from. ``slots`` are those this rank reads; none means the durable checkpoint."""

    step: int
    state: TrainingState
    lineage: Lineage
    slots: tuple[StagedSlot, ...] = ()

    @property
    def location(self) -> str:
        return "in memory" if self.slots else "on durable storage"


@dataclass(frozen=True)
class RestorePointFinder:
    """Collects the reports of all ranks for ``restore.decide_restore``, and verifies what it chooses.

    >>> decision, restore_point = finder.find()
    """

    checkpoints: CheckpointStore
    flash_directory: Path | None
    run_directory: Path
    model: nn.Module
    rank_group: RankGroup

    def find(self, max_step: float = math.inf) -> tuple[RestoreDecision, RestorePoint | None]:
        mine = self._scan_flash()
        durable = self.rank_group.on_rank0(self._scan_durable)
        run_lineage = self.rank_group.on_rank0(self._read_run_lineage)
        while True:
            ranks = self.rank_group.on_all_ranks(lambda: RankReport(tuple(mine)))
            decision = decide_restore(ranks, durable, run_lineage, max_step)
            # Checksums only of the state that would be restored: a state is as large as the memory.
            if decision.chosen is None or self._is_valid(decision.chosen, mine, durable):
                break
        for rejected in decision.rejected:
            warn(str(rejected))
        if (chosen := decision.chosen) is None:
            return decision, None
        if chosen.tier == "durable":
            # A failed read fails on all ranks.
            state = self.rank_group.on_rank0(lambda: self.checkpoints.read_state(chosen.step))
            return decision, RestorePoint(chosen.step, state, chosen.lineage)
        slots = tuple(mine[report] for report in chosen.sources[self.rank_group.rank])
        held = slots[0].header.state
        assert held is not None  # slots that are not finished are not chosen
        return decision, RestorePoint(chosen.step, held, chosen.lineage, slots)

    def _scan_flash(self) -> dict[SlotReport, StagedSlot]:
        """The slots in this machine's memory."""
        if self.flash_directory is None:
            return {}
        if (reason := privacy_problem(self.flash_directory)) is not None:
            warn(f"{reason}: it is not used, and a restart resumes from the last durable checkpoint")
            return {}
        layout = layout_fingerprint(slot_layout(dict(flatten_tensors({"model": get_model_state_dict(self.model)}))))
        interned: dict[Lineage | None, Lineage | None] = {}  # sent to all ranks: each object is pickled once
        return {
            SlotReport(
                rank=slot.rank,
                world_size=slot.world_size,
                step=slot.header.step,
                lineage=interned.setdefault(slot.header.lineage, slot.header.lineage),
                same_layout=slot.header.layout == layout,
                problem=f"{slot.data.name} was not finished" if slot.header.hash is None else None,
            ): slot
            for slot in find_staged_slots(self.flash_directory)
        }

    def _scan_durable(self) -> list[DurableReport]:
        return [self._inspect_durable(step) for step in self.checkpoints.steps()]

    def _inspect_durable(self, step: int) -> DurableReport:
        path, lineages = self.checkpoints.path(step), list[Lineage]()
        result = check_with_retries(lambda: lineages.append(self._lineage_of(step)))
        if result.kind == "valid":
            return DurableReport(str(path), step, lineages[0])
        sizes = verify_sizes(path, step)  # names the file that is missing or truncated
        if sizes.kind == "damaged":
            result = sizes
        return DurableReport(str(path), step, None, (result.reason,), result.kind == "unreadable")

    def _lineage_of(self, step: int) -> Lineage:
        try:
            return self.checkpoints.read_header(step).lineage or UNKNOWN_LINEAGE
        except MISSING_FILE_ERRORS:
            raise DamagedError(f"{STATE_FILE} is missing") from None
        except Z2aError as error:
            if isinstance(error.__cause__, ValueError):  # it was read, but is not valid
                raise DamagedError(str(error)) from error
            raise

    def _read_run_lineage(self) -> Lineage | None:
        try:
            return read_lineage(self.run_directory)
        except (OSError, Z2aError) as error:
            warn(f"the newest durable checkpoint decides which history is the current one: {error}")
            return None

    def _is_valid(
        self, chosen: RestoreChoice, mine: dict[SlotReport, StagedSlot], durable: list[DurableReport]
    ) -> bool:
        """Whether every rank finds its part valid; problems are added to the reports.

        Damage found by one rank is damage; a failed read on some ranks proves nothing.
        """
        if chosen.tier == "memory":
            bad = {}
            for report in chosen.sources[self.rank_group.rank]:
                if (problem := mine[report].problem()) is not None:
                    bad[report] = f"{mine[report].data.name} {problem}"
            for report, problem in bad.items():
                mine[replace(report, problem=problem)] = mine.pop(report)
            return not any(self.rank_group.on_all_ranks(lambda: bool(bad)))
        rank_slice = (self.rank_group.rank, self.rank_group.world_size)
        results = self.rank_group.on_all_ranks(lambda: self.checkpoints.verify(chosen.step, rank_slice))
        kind = worst_result(results).kind
        problems = [
            f"{result.reason} (rank {rank})" if self.rank_group.world_size > 1 else result.reason
            for rank, result in enumerate(results)
            if result.kind == kind != "valid"
        ][:MAX_RANKS_IN_REASON]
        [index] = [number for number, report in enumerate(durable) if report.step == chosen.step]
        durable[index] = replace(durable[index], problems=tuple(problems), unreadable=kind == "unreadable")
        return not problems
