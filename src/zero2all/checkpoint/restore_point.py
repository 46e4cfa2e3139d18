"""Finds the state to restore: what each rank holds in memory, what is on durable storage, and which of it is valid."""

from __future__ import annotations

import math
import operator
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from zero2all.base.console import say, warn
from zero2all.base.errors import Z2aError
from zero2all.base.network.connection import TamperedError
from zero2all.base.units import show_bytes
from zero2all.checkpoint.background import run_in_background
from zero2all.checkpoint.checkpoint_directory import STATE_FILE
from zero2all.checkpoint.checkpoint_store import CheckpointStore
from zero2all.checkpoint.integrity import (
    MISSING_FILE_ERRORS,
    VALID,
    DamagedError,
    IntegrityKind,
    IntegrityResult,
    check_with_retries,
    verify_sizes,
    worst_result,
)
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.replica_server import ReplicaRequest
from zero2all.checkpoint.replicas import Replicas
from zero2all.checkpoint.restore import (
    MAX_RANKS_IN_REASON,
    DurableReport,
    Fetch,
    RankReport,
    RestoreChoice,
    RestoreDecision,
    SlotReport,
    decide_restore,
)
from zero2all.checkpoint.slot_directories import privacy_problem
from zero2all.checkpoint.slot_format import layout_fingerprint, slot_layout
from zero2all.checkpoint.staged_slot import StagedSlot, find_staged_slots
from zero2all.checkpoint.state_dict import flatten_tensors
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE, Lineage, TrainingState, read_lineage


@dataclass(frozen=True)
class RestorePoint:
    """A valid state to resume from. ``slots`` are those this rank reads; none means the durable checkpoint."""

    step: int
    state: TrainingState
    lineage: Lineage
    slots: tuple[StagedSlot, ...] = ()
    verification: Future[IntegrityResult] | None = None
    """Checksums of this rank's files, which are computed while the state is loaded; None if they are known."""

    @property
    def location(self) -> str:
        return "in memory" if self.slots else "on durable storage"


@dataclass(frozen=True)
class _Share:
    """The part of a decision that one rank gets: its own ``sources``, and the ``fetches`` of its node. Rank 0 gets
    the fetches of all nodes, since it reports them."""

    decision: RestoreDecision
    copies: bool
    """True if any rank copies a part."""


def _with_short_lineage(slot: SlotReport) -> SlotReport:
    return replace(slot, lineage=slot.lineage[-1:])


def _with_lineage(slot: SlotReport, lineages: dict[str, Lineage]) -> SlotReport:
    return replace(slot, lineage=lineages[slot.history])


def _shares(decision: RestoreDecision, ranks: Sequence[RankReport]) -> list[_Share]:
    chosen = decision.chosen
    if chosen is None or chosen.tier == "durable":
        return [_Share(decision, copies=False)] * len(ranks)
    by_node: dict[int | None, list[Fetch]] = {}
    for fetch in chosen.fetches:
        for node in {ranks[fetch.to].node, ranks[fetch.holder].node}:
            by_node.setdefault(node, []).append(fetch)
    shares = []
    for rank, sources in enumerate(chosen.sources):
        fetches = chosen.fetches if rank == 0 else tuple(by_node.get(ranks[rank].node, ()))
        short = tuple(map(_with_short_lineage, sources))
        copied = tuple(replace(fetch, slot=_with_short_lineage(fetch.slot)) for fetch in fetches)
        own = replace(chosen, sources=(short,), fetches=copied)
        shares.append(_Share(replace(decision, chosen=own), bool(chosen.fetches)))
    return shares


def worst_problems(results: Sequence[IntegrityResult]) -> tuple[IntegrityKind, list[str]]:
    """The worst kind of result, and the first problems of that kind."""
    kind = worst_result(results).kind
    found = [(rank, result.reason) for rank, result in enumerate(results) if result.kind == kind != "valid"]
    return kind, [
        f"{reason} (rank {rank})" if len(results) > 1 else reason for rank, reason in found[:MAX_RANKS_IN_REASON]
    ]


class DamagedStateError(Exception):
    """A checkpoint proved to be damaged while it was loaded. The model and the optimizers hold nothing of use now."""

    def __init__(self, step: int, problems: Sequence[str], *, unreadable: bool) -> None:
        super().__init__("; ".join(problems))
        self.step, self.problems, self.unreadable = step, tuple(problems), unreadable


MAX_ROUNDS = 8  # of copying between nodes, before each reads only what it holds
SlotPart = tuple[int, int, int, str]


def _part(report: SlotReport) -> SlotPart:
    return report.rank, report.world_size, report.step, report.history


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
    replicas: Replicas | None = None
    damaged: tuple[DamagedStateError, ...] = ()
    """Checkpoints that proved to be damaged when they were loaded."""

    def find(self, max_step: float = math.inf) -> tuple[RestoreDecision, RestorePoint | None]:
        layout = layout_fingerprint(slot_layout(dict(flatten_tensors({"model": get_model_state_dict(self.model)}))))
        mine, copied, rounds = self._scan_flash(), list[Fetch](), 0
        durable = self.rank_group.on_rank0(self._scan_durable)
        run_lineage = self.rank_group.on_rank0(self._read_run_lineage)
        while True:
            report = RankReport(tuple(mine), layout, self._node if rounds < MAX_ROUNDS else None, self._free_bytes())
            decision, copies = self._decide(report, durable, run_lineage, max_step)
            if decision.chosen is not None and copies:
                copied, rounds = copied + self._fetch(decision.chosen, mine), rounds + 1
                continue  # what was copied is now held here
            # Checksums only of the state that would be restored: a state is as large as the memory.
            chosen, verifies_later = decision.chosen, self._has_fallback(decision.chosen, durable)
            if chosen is None or self._is_valid(chosen, mine, durable, verifies_later=verifies_later):
                break
        for rejected in decision.rejected:
            warn(str(rejected))
        if chosen is None:
            return decision, None
        if chosen.tier == "durable":
            # A failed read fails on all ranks.
            state = self.rank_group.on_rank0(lambda: self.checkpoints.read_state(chosen.step))
            verification = run_in_background(lambda: self._verify(chosen.step)) if verifies_later else None
            return decision, RestorePoint(chosen.step, state, chosen.lineage, verification=verification)
        if used := [fetch for fetch in copied if _part(fetch.slot)[2:] == (chosen.step, chosen.history)]:
            size = show_bytes(sum(fetch.slot.bytes for fetch in used))
            reason = f"{decision.reason}, {len(used)} parts copied from other nodes ({size})"
            decision = replace(decision, reason=reason)
        slots = tuple(mine[report] for report in chosen.sources[0])
        held = slots[0].header.state
        assert held is not None  # slots that are not finished are not chosen
        return decision, RestorePoint(chosen.step, held, chosen.lineage, slots)

    def _decide(
        self, report: RankReport, durable: list[DurableReport], run_lineage: Lineage | None, max_step: float
    ) -> tuple[RestoreDecision, bool]:
        """Rank 0 decides. Lineages, which may have hundreds of histories, are sent once, not with every slot."""
        own = {slot.history: slot.lineage for slot in report.slots}
        lineages = self.rank_group.reduce(lambda: own, operator.or_)

        def decide(ranks: list[RankReport]) -> list[_Share]:
            whole = [replace(one, slots=tuple(_with_lineage(slot, lineages) for slot in one.slots)) for one in ranks]
            return _shares(decide_restore(whole, durable, run_lineage, max_step), ranks)

        short = replace(report, slots=tuple(map(_with_short_lineage, report.slots)))
        share = self.rank_group.scatter(lambda: short, decide)
        chosen = share.decision.chosen
        if chosen is not None and chosen.tier == "memory":
            sources = tuple(_with_lineage(slot, lineages) for slot in chosen.sources[0])
            chosen = replace(chosen, sources=(sources,))
        return replace(share.decision, chosen=chosen), share.copies

    def _scan_flash(self) -> dict[SlotReport, StagedSlot]:
        """The slots in this machine's memory."""
        if self.flash_directory is None:
            return {}
        if (reason := privacy_problem(self.flash_directory)) is not None:
            warn(f"{reason}: it is not used, and a restart resumes from the last durable checkpoint")
            return {}
        interned: dict[Lineage, Lineage] = {}  # sent to all ranks: each object is pickled once
        return {
            SlotReport(
                rank=slot.rank,
                world_size=slot.world_size,
                step=slot.header.step,
                lineage=interned.setdefault(slot.header.lineage, slot.header.lineage),
                layout=slot.header.layout or "",
                problem=f"{slot.data.name} was not finished" if slot.header.hash is None else None,
                replica=slot.replica,
                bytes=slot.data.stat().st_size if slot.data.exists() else 0,
            ): slot
            for slot in find_staged_slots(self.flash_directory)
        }

    @property
    def _node(self) -> int | None:
        return None if self.replicas is None else self.replicas.nodes[self.rank_group.rank]

    def _free_bytes(self) -> float:
        if self.replicas is None or self.flash_directory is None:
            return 0.0  # nothing is copied
        return shutil.disk_usage(self.flash_directory.parent).free

    def _fetch(self, chosen: RestoreChoice, mine: dict[SlotReport, StagedSlot]) -> list[Fetch]:
        """Copy the parts assigned to this rank, and update ``mine``. Returns the copies that this rank knows of."""
        assert self.replicas is not None
        replicas, rank = self.replicas, self.rank_group.rank
        mine_to_fetch = [fetch for fetch in chosen.fetches if fetch.to == rank]
        say(f"copying {len(chosen.fetches)} parts of the state of step {chosen.step} between the nodes' memory")
        failed: list[tuple[Fetch, str]] = []
        for fetch in mine_to_fetch:
            slot = fetch.slot
            request = ReplicaRequest("fetch", slot.rank, slot.world_size, slot.step, chosen.history)
            own = (slot.rank, slot.world_size) == (rank, self.rank_group.world_size)
            try:
                replicas.fetch(fetch.holder, request, slot.bytes, own=own)
            except (OSError, Z2aError, TamperedError) as error:
                failed.append((fetch, str(error) or type(error).__name__))
        failures = self.rank_group.reduce(lambda: failed, operator.add)
        for fetch, why in failures:
            source = f"the part of rank {fetch.slot.rank} from the node of rank {fetch.holder}"
            warn(f"rank {fetch.to} cannot copy {source}: {why}")
        copied = [fetch for fetch in chosen.fetches if fetch not in {failure for failure, _ in failures}]
        self._rescan(
            mine,
            arrived={_part(fetch.slot) for fetch in copied if replicas.nodes[fetch.to] == self._node},
            unfetchable={(replicas.nodes[fetch.holder], _part(fetch.slot)) for fetch, _ in failures},
        )
        return copied

    def _rescan(
        self, mine: dict[SlotReport, StagedSlot], arrived: set[SlotPart], unfetchable: set[tuple[int, SlotPart]]
    ) -> None:
        """Add what was copied here, and keep what is known about the rest."""
        known = {(slot.data, _part(report)): report for report, slot in mine.items() if _part(report) not in arrived}
        found = self._scan_flash()
        mine.clear()
        for report, slot in found.items():
            report = known.get((slot.data, _part(report)), report)
            node = self._node
            assert node is not None
            if (node, _part(report)) in unfetchable:
                report = replace(report, fetchable=False)
            mine[report] = slot

    def _scan_durable(self) -> list[DurableReport]:
        known = {error.step: error for error in self.damaged}
        return [
            replace(report, problems=known[report.step].problems, unreadable=known[report.step].unreadable)
            if report.step in known
            else report
            for report in map(self._inspect_durable, self.checkpoints.steps())
        ]

    def _has_fallback(self, chosen: RestoreChoice | None, durable: list[DurableReport]) -> bool:
        """Return whether the checksums of a checkpoint may be computed while it is loaded.

        If they are wrong, the weights are overwritten, so there must be a different state to load.
        """
        others = [report for report in durable if chosen is not None and report.step < chosen.step]
        return chosen is not None and chosen.tier == "durable" and any(not report.problems for report in others)

    def _verify_state_file(self, step: int) -> IntegrityResult:
        """The state is used before the checksums of the weights are known."""
        return self.checkpoints.verify_state_file(step) if self.rank_group.rank == 0 else VALID

    def _verify(self, step: int) -> IntegrityResult:
        return self.checkpoints.verify(step, (self.rank_group.rank, self.rank_group.world_size))

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
        self,
        chosen: RestoreChoice,
        mine: dict[SlotReport, StagedSlot],
        durable: list[DurableReport],
        *,
        verifies_later: bool,
    ) -> bool:
        """Return whether every rank finds its part valid; problems are added to the reports.

        Damage found by one rank is damage; a failed read on some ranks proves nothing.
        """
        if chosen.tier == "memory":
            bad = {}
            for report in chosen.sources[0]:
                if (problem := mine[report].problem()) is not None:
                    bad[report] = f"{mine[report].data.name} {problem}"
            own = [(self._node, report, problem) for report, problem in bad.items()]
            found = self.rank_group.reduce(lambda: own, operator.add)  # none, as a rule
            here = {report: problem for node, report, problem in found if node is not None and node == self._node}
            for report, problem in (bad | here).items():
                if report in mine:  # ranks of a node report the same
                    mine[replace(report, problem=problem)] = mine.pop(report)
            return not found
        verify = self._verify_state_file if verifies_later else self._verify
        kind, problems = self.rank_group.gather(lambda: verify(chosen.step), worst_problems)
        [index] = [number for number, report in enumerate(durable) if report.step == chosen.step]
        durable[index] = replace(durable[index], problems=tuple(problems), unreadable=kind == "unreadable")
        return not problems
