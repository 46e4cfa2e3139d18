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


def test_restores_along_one_history_are_right() -> None:
    marks = [*restored("a", 0, "", ""), *restored("b", 12, "a", "a"), *restored("c", 8, "a", "a")]
    assert find_wrong_restores([*marks, *restored("d", 20, "c", "c")]) == []


def test_states_of_two_starts_are_a_mixture() -> None:
    marks = [*restored("a", 0, "", ""), *restored("b", 8, "a", "a"), *restored("c", 12, "b", "a")]
    assert find_wrong_restores(marks) == ["the ranks restored step 12 from states of 2 different starts"]


def test_a_state_from_before_a_restart_is_abandoned_after_the_step_of_that_restart() -> None:
    marks = [*restored("a", 0, "", ""), *restored("b", 8, "a", "a")]
    assert find_wrong_restores([*marks, *restored("c", 8, "a", "a")]) == []
    problem = "the state of step 12 that was restored is of an abandoned history"
    assert find_wrong_restores([*marks, *restored("c", 12, "a", "a")]) == [problem]
    abandoned = [*marks, *restored("c", 4, "a", "a"), *restored("d", 12, "b", "b")]
    assert find_wrong_restores(abandoned) == [problem], "b began at a step that c has taken over"


def test_ranks_that_the_saved_job_did_not_have_know_no_origin() -> None:
    marks = [*restored("a", 0, ""), *restored("b", 8, "a", "")]
    assert find_wrong_restores(marks) == []
    assert find_wrong_restores(restored("a", 8, "")) == ["no rank knows who wrote the state of step 8"]


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
