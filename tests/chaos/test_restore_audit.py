"""Restored states carry who wrote them: the suite finds mixed and abandoned ones without looking at a loss."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.chaos.random_histories import (
    ENDING_EVENTS,
    EVENTS,
    NUM_EVENTS,
    RANDOM_HISTORIES,
    draw_history,
)
from tests.chaos.restore_audit import (
    RestoreMark,
    RestoreMarker,
    find_wrong_restores,
    read_restore_marks,
    segment_seed,
)

SCRATCH = 7  # a seed that no start of the suite has set


def restored(segment: str, step: int, *origins: str) -> list[RestoreMark]:
    """One mark per rank; without a name it is of a state without a known origin."""
    ranks = enumerate(origins)
    return [RestoreMark(0.0, segment, rank, step, segment_seed(name) if name else SCRATCH) for rank, name in ranks]


A, B, C8 = restored("a", 0, "", ""), restored("b", 8, "a", "a"), restored("c", 8, "a", "a")
ABANDONED = ["the state of step 12 that was restored is of an abandoned history"]


@pytest.mark.parametrize(
    ("marks", "problems"),
    [
        ([*A, *restored("b", 12, "a", "a"), *C8, *restored("d", 20, "c", "c")], []),  # along one history
        ([*A, *B, *restored("c", 12, "b", "a")], ["the ranks restored step 12 from states of 2 different starts"]),
        ([*A, *B, *C8], []),
        ([*A, *B, *restored("c", 12, "a", "a")], ABANDONED),  # from before a restart, and after its step
        # b began at a step that c has taken over.
        ([*A, *B, *restored("c", 4, "a", "a"), *restored("d", 12, "b", "b")], ABANDONED),
        ([*restored("a", 0, ""), *restored("b", 8, "a", "")], []),  # the saved job had fewer ranks
        (restored("a", 8, ""), ["no rank knows who wrote the state of step 8"]),
    ],
)
def test_mixed_and_abandoned_states_are_wrong_restores(marks: list[RestoreMark], problems: list[str]) -> None:
    assert find_wrong_restores(marks) == problems


def test_a_marker_writes_the_seed_of_the_state_and_then_its_own(tmp_path: Path) -> None:
    saved = torch.get_rng_state()
    try:
        torch.manual_seed(SCRATCH)
        first = RestoreMarker("first", 0, tmp_path)
        for step in (0, 1):
            first.on_batch(step)
        state = torch.get_rng_state()  # what a checkpoint holds
        torch.manual_seed(SCRATCH)
        second = RestoreMarker("second", 0, tmp_path)
        second.on_restore()
        torch.set_rng_state(state)
        second.on_batch(2)
    finally:
        torch.set_rng_state(saved)
    marks = read_restore_marks(tmp_path)
    assert [(mark.segment, mark.step) for mark in marks] == [("first/0", 0), ("second/1", 2)]
    assert [mark.seed for mark in marks] == [SCRATCH, segment_seed("first/0")]
    assert find_wrong_restores(marks) == []


@pytest.mark.parametrize("seed", range(50))
def test_a_random_history_is_reproducible_and_can_be_driven(seed: int) -> None:
    events = draw_history(seed)
    assert events == draw_history(seed)
    assert len(events) == NUM_EVENTS
    assert [event.step for event in events] == sorted({event.step for event in events})
    for event, following in pairwise(events):
        assert following.nodes == event.next_nodes
        assert event.kind in ENDING_EVENTS or event.nodes == event.next_nodes
    assert events[-1].kind != "storage fails"


def test_the_random_histories_of_the_table_have_every_event() -> None:
    seeds = [int(fault.name.split()[-1]) for fault in RANDOM_HISTORIES]
    assert {event.kind for seed in seeds for event in draw_history(seed)} == {*EVENTS}
    assert {fault.loss_tolerance for fault in RANDOM_HISTORIES} == {0.0, 1e-5}, "also with another number of ranks"
