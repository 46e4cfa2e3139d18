"""The decision what to restore, over random histories of nodes that come, go, forget and corrupt what they hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.base.records import parse_record
from zero2all.checkpoint.restore import (
    DurableReport,
    RankReport,
    RestoreChoice,
    RestoreDecision,
    SlotReport,
    decide_restore,
)
from zero2all.checkpoint.training_state import (
    UNKNOWN_LINEAGE,
    Branch,
    HistoryRecord,
    Lineage,
    contains_state,
    extend_lineage,
)

NODES = "ABC"  # few, so that each meets its own past again


@dataclass
class Slot:
    step: int
    lineage: Lineage
    finished: bool = True
    corrupt: bool = False


@dataclass
class Saved:
    step: int
    lineage: Lineage
    corrupt: bool = False


@dataclass
class Job:
    """A simulated run. ``parents`` is the ground truth about histories, independent of any lineage."""

    random: Random
    memory: dict[str, dict[tuple[int, int], list[Slot]]] = field(default_factory=lambda: {node: {} for node in NODES})
    durable: list[Saved] = field(default_factory=list)
    run_lineage: Lineage | None = None
    parents: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    last: str | None = None
    """The history of the last start."""

    def start(self) -> tuple[list[str], RestoreDecision]:
        """On random nodes, with one or two ranks on each; decide, train, save, and be killed at any moment."""
        draw = self.random
        nodes, each = draw.sample(NODES, draw.choice([1, 2, 2, 2, 3])), draw.choice([1, 1, 1, 2])
        placement = [node for node in nodes for _ in range(each)]
        decision = self.decide(placement)
        self.check(placement, decision)
        chosen = decision.chosen
        step, lineage = (0, ()) if chosen is None else (chosen.step, chosen.lineage)
        history = f"h{len(self.parents)}"
        self.parents[history] = (lineage[-1].history if lineage else None, step)
        self.last, self.run_lineage = history, extend_lineage(lineage, step, history)
        for node in set(placement):
            self.forget_abandoned(node)
        self.train(placement, step)
        return placement, decision

    def train(self, placement: list[str], step: int) -> None:
        draw = self.random
        for number in range(draw.randint(0, 4)):
            step += 1
            if number == 0:  # what others left here is removed at the first save
                for node in set(placement):
                    mine = {(rank, len(placement)) for rank, place in enumerate(placement) if place == node}
                    self.memory[node] = {key: slots for key, slots in self.memory[node].items() if key in mine}
            torn = {rank for rank in range(len(placement)) if draw.random() < 0.1}
            for rank, node in enumerate(placement):
                slots = self.memory[node].setdefault((rank, len(placement)), [])
                if len(slots) == 2:
                    slots.remove(min(slots, key=lambda slot: slot.step))
                slots.append(Slot(step, self.run_lineage, finished=rank not in torn))
            if torn:
                return  # killed
            if draw.random() < 0.3:
                self.durable = [saved for saved in self.durable if saved.step < step][-1:]
                self.durable.append(Saved(step, self.run_lineage))

    def forget_abandoned(self, node: str) -> None:
        for slots in self.memory[node].values():
            slots[:] = [slot for slot in slots if contains_state(self.run_lineage, slot.step, slot.lineage[-1].history)]

    def inject_fault(self) -> None:
        """A node is rebooted, bits flip, a file is lost."""
        draw = self.random
        what = draw.choice(["reboot", "slot", "durable", "nothing", "nothing", "nothing"])
        if what == "reboot":
            self.memory[draw.choice(NODES)].clear()
        elif what == "slot" and (slots := [slot for _, _, slot in self.slots()]):
            draw.choice(slots).corrupt = True
        elif what == "durable" and self.durable:
            draw.choice(self.durable).corrupt = True

    def slots(self) -> Iterator[tuple[str, tuple[int, int], Slot]]:
        for node, held in self.memory.items():
            for key, slots in held.items():
                for slot in slots:
                    yield node, key, slot

    def decide(self, placement: list[str]) -> RestoreDecision:
        """As the checkpoint manager does: checksums only of the chosen state, then again without corrupt ones."""
        bad: set[int] = set()
        while True:
            reports = [
                RankReport(tuple(self.report(key, slot, bad) for at, key, slot in self.slots() if at == node))
                for node in placement
            ]
            durable = [
                DurableReport(f"step-{saved.step}", saved.step, saved.lineage, ("bad",) if id(saved) in bad else ())
                for saved in self.durable
            ]
            decision = decide_restore(reports, durable, self.run_lineage)
            found = {id(state) for state in self.read(placement, decision.chosen) if state.corrupt}
            if not found:
                return decision
            assert not found & bad, "known to be corrupt"
            bad |= found

    @staticmethod
    def report(key: tuple[int, int], slot: Slot, bad: set[int]) -> SlotReport:
        problem = "bad" if id(slot) in bad else None if slot.finished else "was not finished"
        return SlotReport(*key, slot.step, slot.lineage, layout="", problem=problem)

    def read(self, placement: list[str], chosen: RestoreChoice | None) -> list[Slot | Saved]:
        """What is read by all ranks together."""
        if chosen is None:
            return []
        if chosen.tier == "durable":
            return [saved for saved in self.durable if saved.step == chosen.step]
        return [
            slot
            for node, sources in zip(placement, chosen.sources, strict=True)
            for source in sources
            for slot in self.memory[node][source.rank, source.world_size]
            if (slot.step, slot.lineage) == (source.step, source.lineage)
        ]

    # What must hold

    def check(self, placement: list[str], decision: RestoreDecision) -> None:
        chosen, world_size = decision.chosen, len(placement)
        for state in self.read(placement, chosen):
            assert (state.step, state.lineage) == (chosen.step, chosen.lineage), "two states are combined"
            assert not state.corrupt
            assert not isinstance(state, Slot) or state.finished
        if chosen is not None and chosen.tier == "memory":
            assert len(chosen.sources) == world_size
            for rank, sources in enumerate(chosen.sources):
                parts = [(source.rank, source.world_size) for source in sources]
                of = sources[0].world_size
                assert parts in ([(rank, world_size)], [(number, of) for number in range(of)]), "a part is missing"
        valid = [saved.step for saved in self.durable if not saved.corrupt]
        if self.run_lineage is None:  # only if the history file was lost
            return
        alive = [saved.step for saved in self.durable if not saved.corrupt and self.is_current(saved)]
        alive += [step for step, history in self.held_by_all(placement) if self.is_current(Saved(step, history))]
        if alive:
            assert chosen is not None, "a valid state was there"
            assert chosen.step == max(alive), "not the newest"
            assert self.is_current(Saved(chosen.step, chosen.lineage)), "of an abandoned history"
        elif valid:
            assert (chosen.tier, chosen.step) == ("durable", max(valid)), "better than nothing"
        else:
            assert chosen is None

    def is_current(self, state: Saved) -> bool:
        """By the ground truth: the last start descends from it."""
        history, until = self.last, math.inf
        while history is not None:
            parent, first = self.parents[history]
            if history == state.lineage[-1].history:
                return first <= state.step <= until
            history, until = parent, first
        return False

    def held_by_all(self, placement: list[str]) -> set[tuple[int, Lineage]]:
        """States in memory of which every rank has its own part, or all parts."""
        found = []
        for rank, node in enumerate(placement):
            here: dict[tuple[int, Lineage], set[tuple[int, int]]] = {}
            for at, key, slot in self.slots():
                if at == node and slot.finished and not slot.corrupt:
                    here.setdefault((slot.step, slot.lineage), set()).add(key)
            own = (rank, len(placement))
            found.append({state for state, keys in here.items() if own in keys or len(keys) == next(iter(keys))[1]})
        return set.intersection(*found)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_the_newest_valid_state_of_the_current_history_is_restored(seed: int) -> None:
    job = Job(Random(seed))
    for _ in range(20):
        job.start()
        job.inject_fault()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_without_the_history_file_no_two_states_are_combined(seed: int) -> None:
    """And none is restored that the newest durable checkpoint does not descend from, nor descends from it."""
    job = Job(Random(seed))
    for _ in range(20):
        job.run_lineage = None
        newest = max(job.durable, key=lambda saved: saved.step, default=None)
        chosen = job.start()[1].chosen
        if newest is not None and chosen is not None and chosen.tier == "memory":
            on_the_way = contains_state(newest.lineage, chosen.step, chosen.history)
            assert on_the_way or newest.lineage[-1].history in {branch.history for branch in chosen.lineage}
        job.inject_fault()


LINE = (Branch("a", 0), Branch("b", 900))


def test_the_same_input_gives_the_same_decision_in_any_order() -> None:
    slots = tuple(SlotReport(0, 1, step, LINE, layout="") for step in (980, 990))
    durable = [DurableReport("x", 900, LINE[:1]), DurableReport("y", 950, LINE)]
    one = decide_restore([RankReport(slots)], durable, LINE)
    assert one == decide_restore([RankReport(slots[::-1])], durable[::-1], LINE)
    assert (one.chosen.step, one.chosen.tier, one.rejected) == (990, "memory", ())


def test_a_decision_says_what_was_rejected_and_why() -> None:
    ranks = [
        RankReport((SlotReport(0, 2, 990, LINE, "", problem="slot-0.bin does not match its checksum"),)),
        RankReport((SlotReport(1, 2, 990, LINE, ""), SlotReport(1, 2, 1000, LINE[:1], ""))),
    ]
    durable = [
        DurableReport("dir/step-950", 950, None, ("state.json is missing",)),
        DurableReport("old", 900, UNKNOWN_LINEAGE),
    ]
    found = decide_restore(ranks, [*durable, DurableReport("dir/step-900", 900, LINE[:1])], LINE)
    assert (found.chosen.step, found.chosen.history) == (900, "a")
    said = [str(rejected) for rejected in found.rejected]
    assert said[:3] == [
        "the state of step 1000 in memory (history a) is skipped: of an abandoned history; "
        "the run continued as history b from step 900",
        "the state of step 990 in memory (history b) is skipped: slot-0.bin does not match its checksum (rank 0)",
        "checkpoint dir/step-950 (history unknown) is skipped: state.json is missing",
    ]


def test_a_thousand_ranks_without_a_state_are_not_all_named() -> None:
    ranks = [RankReport((SlotReport(0, 1000, 990, LINE, ""),)), *[RankReport()] * 999]
    [rejected] = decide_restore(ranks, [], LINE).rejected
    assert rejected.why.endswith("and 996 more ranks")


def test_what_was_saved_under_no_history_is_used_only_from_durable_storage() -> None:
    found = decide_restore([RankReport()], [DurableReport("x", 900, UNKNOWN_LINEAGE)], None)
    assert (found.chosen.step, found.chosen.tier) == (900, "durable")
    after = extend_lineage(UNKNOWN_LINEAGE, 900, "b")
    slots = RankReport((SlotReport(0, 1, 910, after, ""),))
    again = decide_restore([slots], [DurableReport("x", 900, UNKNOWN_LINEAGE)], after)
    assert again.chosen.step == 910


def test_a_slot_of_another_layout_needs_the_parts_of_all_ranks() -> None:
    own = [SlotReport(rank, 2, 990, LINE, layout="another") for rank in range(2)]
    apart = decide_restore([RankReport((own[0],)), RankReport((own[1],))], [], LINE)
    assert apart.chosen is None
    both = decide_restore([RankReport(tuple(own))] * 2, [], LINE)
    assert both.chosen.sources == (tuple(own), tuple(own))
    assert "resharded" in both.reason
    torn = RankReport((own[0], replace(own[1], problem="was not finished")))
    assert decide_restore([torn, RankReport(tuple(own))], [], LINE).chosen is None


def test_a_lineage_survives_json_and_stays_short() -> None:
    lineage: Lineage = ()
    for step in range(1000):
        lineage = extend_lineage(lineage, step, f"h{step}")
    record = HistoryRecord(lineage)
    assert parse_record(HistoryRecord, json.loads(json.dumps(asdict(record))), "history.json") == record
    assert len(lineage) == 256
    assert contains_state(lineage, 999, "h998")
    assert not contains_state(lineage, 1000, "h998")
