"""Which islands take part in an exchange, and who hears of it: all decisions, with a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

from zero2all.base.errors import UsageError
from zero2all.cluster.launch.islands.messages import (
    EnterIslands,
    OutcomeAnswer,
    QuorumAnswer,
    ReadyToExchange,
    ReportExchange,
    StartAnswer,
    StartIsland,
)
from zero2all.cluster.launch.islands.quorum import (
    EXCHANGE_PATIENCE,
    MAX_BLAME,
    SILENT_AFTER,
    Island,
    IslandQuorum,
    IslandTakenError,
)

PATIENCE = 60.0


class Rendezvous:
    """A quorum with a clock, in which islands live until they are silenced."""

    def __init__(self, islands: int) -> None:
        self.quorum, self.islands, self.now = IslandQuorum(islands, {}), islands, 0.0
        self.silent: set[int] = set()

    def enter(self, number: int, **changed: str) -> Island:
        identity = {"recipe": "r", **changed}
        return self.quorum.enter(
            EnterIslands("t", number, self.islands, identity, [("10.0.0.1", 1000 + number)], PATIENCE), self.now
        )

    def started(self, *numbers: int, exchange: int = -1) -> list[Island]:
        found = [self.enter(number) for number in numbers]
        for island in found:
            self.quorum.start(island, StartIsland(exchange, "d"), self.now)
        if len(numbers) < self.islands:
            self.pass_time(PATIENCE)
        self.advance()
        assert all(isinstance(self.answer(island), StartAnswer) for island in found)
        return found

    def ready(self, island: Island, exchange: int, last: int = -1) -> None:
        self.quorum.ready(island, ReadyToExchange(exchange, last), self.now)
        self.advance()

    def report(self, island: Island, exchange: int, attempt: int, *failed: int) -> None:
        self.quorum.report(island, ReportExchange(exchange, attempt, list(failed)))
        self.advance()

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds) + 1):
            self.now += 1
            self.advance()

    def advance(self) -> None:
        for island in self.quorum.present.values():
            if island.number not in self.silent:
                island.last_heard = self.now
        self.quorum.advance(self.now)

    def answer(self, island: Island) -> Any:
        answer, island.answer = island.answer, None
        return answer

    def attempt(self, islands: list[Island], exchange: int = 4) -> int:
        """All are ready and hear who takes part. Returns the number of the attempt."""
        for island in islands:
            self.ready(island, exchange)
        answers = self.answers(islands)
        expected = [island.number for island in islands]
        assert [sorted(answer.members) for answer in answers] == [expected] * len(islands)
        return answers[0].attempt

    def answers(self, islands: list[Island]) -> list[Any]:
        return [self.answer(island) for island in islands]

    def complete(self, islands: list[Island], exchange: int) -> list[Any]:
        attempt = self.attempt(islands, exchange)
        for island in islands:
            self.quorum.report(island, ReportExchange(exchange, attempt, []))
        self.advance()
        return self.answers(islands)

    def fail(self, islands: list[Island], *failed: list[int]) -> None:
        """As many attempts as one island may spoil, each with the same islands out of reach of the others."""
        for _ in range(MAX_BLAME):
            attempt = self.attempt(islands)
            for island, numbers in zip(islands, failed, strict=True):
                self.report(island, 4, attempt, *numbers)
            assert self.answers(islands) == [OutcomeAnswer(is_complete=False)] * len(islands)


def test_a_start_waits_for_all_islands_but_not_for_ever() -> None:
    rendezvous = Rendezvous(3)
    first = rendezvous.enter(0)
    rendezvous.quorum.start(first, StartIsland(-1, "d"), rendezvous.now)
    rendezvous.pass_time(PATIENCE / 2)
    assert first.answer is None
    rendezvous.pass_time(PATIENCE / 2)
    assert rendezvous.answer(first) == StartAnswer(-1, present=[0])
    assert len(Rendezvous(3).started(0, 1, 2)) == 3


def test_islands_begin_with_the_newest_state_that_one_of_them_has() -> None:
    rendezvous = Rendezvous(3)
    islands = [rendezvous.enter(number) for number in range(3)]
    for island, exchange in zip(islands, (4, 8, 8), strict=True):
        rendezvous.quorum.start(island, StartIsland(exchange, f"d{island.number == 0}"), rendezvous.now)
    rendezvous.advance()
    behind, source, same = map(rendezvous.answer, islands)
    assert behind == StartAnswer(8, source=1, addresses=[("10.0.0.1", 1001)], present=[0, 1, 2])
    assert source == StartAnswer(8, recipients=[0], present=[0, 1, 2])
    assert same == StartAnswer(8, present=[0, 1, 2])


def test_states_that_differ_after_the_same_exchange_are_replaced_by_one() -> None:
    rendezvous = Rendezvous(2)
    islands = [rendezvous.enter(number) for number in range(2)]
    for island in islands:
        rendezvous.quorum.start(island, StartIsland(8, f"digest {island.number}"), rendezvous.now)
    rendezvous.advance()
    first, second = rendezvous.answers(islands)
    assert first == StartAnswer(8, recipients=[1], present=[0, 1])
    assert second.source == 0


def test_nobody_uses_an_exchange_before_all_members_have_all_parts() -> None:
    rendezvous = Rendezvous(2)
    one, other = islands = rendezvous.started(0, 1)
    rendezvous.ready(one, 4)
    assert one.answer is None
    attempt = rendezvous.attempt(islands)
    rendezvous.report(one, 4, attempt)
    rendezvous.pass_time(30)
    assert one.answer is None
    rendezvous.report(other, 4, attempt)
    assert rendezvous.answers(islands) == [OutcomeAnswer(is_complete=True)] * 2
    assert rendezvous.quorum.last == 4


def test_an_island_lost_before_it_is_ready_is_not_waited_for() -> None:
    rendezvous = Rendezvous(2)
    one, other = rendezvous.started(0, 1)
    rendezvous.ready(one, 4)
    rendezvous.quorum.leave(other)  # its connection is closed
    rendezvous.advance()
    assert list(rendezvous.answer(one).members) == [0]


def test_a_silent_island_is_lost_within_ten_seconds() -> None:
    rendezvous = Rendezvous(2)
    one, _ = rendezvous.started(0, 1)
    rendezvous.silent = {1}
    rendezvous.ready(one, 4)
    rendezvous.pass_time(SILENT_AFTER)
    assert isinstance(rendezvous.answer(one), QuorumAnswer)
    assert SILENT_AFTER < 10


def test_an_island_that_is_alive_but_does_not_come_is_left_out_in_the_end() -> None:
    rendezvous = Rendezvous(2)
    one, other = rendezvous.started(0, 1)
    rendezvous.ready(one, 4)
    rendezvous.pass_time(EXCHANGE_PATIENCE - 2)
    assert one.answer is None
    rendezvous.pass_time(2)
    rendezvous.report(one, 4, rendezvous.answer(one).attempt)
    rendezvous.ready(other, 4)
    assert rendezvous.answer(other) == QuorumAnswer(is_behind=True)


def test_a_member_lost_half_way_is_left_out_of_the_next_attempt_if_its_part_is_missing() -> None:
    rendezvous = Rendezvous(3)
    one, two, lost = islands = rendezvous.started(0, 1, 2)
    attempt = rendezvous.attempt(islands)
    rendezvous.report(one, 4, attempt)  # has the part
    rendezvous.quorum.leave(lost)
    rendezvous.report(two, 4, attempt, 2)  # has not
    assert rendezvous.answers([one, two]) == [OutcomeAnswer(is_complete=False)] * 2
    assert [type(answer) for answer in rendezvous.complete([one, two], 4)] == [OutcomeAnswer] * 2
    assert rendezvous.quorum.last == 4


def test_a_member_lost_half_way_is_still_used_if_all_others_have_its_part() -> None:
    rendezvous = Rendezvous(2)
    one, lost = islands = rendezvous.started(0, 1)
    attempt = rendezvous.attempt(islands)
    rendezvous.quorum.leave(lost)
    rendezvous.report(one, 4, attempt)
    assert rendezvous.answer(one) == OutcomeAnswer(is_complete=True)
    back = rendezvous.enter(1)
    rendezvous.ready(back, 4)  # it never heard of the outcome
    assert rendezvous.answer(back) == QuorumAnswer(is_behind=True)


def test_a_connection_lost_between_two_exchanges_changes_nothing() -> None:
    rendezvous = Rendezvous(2)
    one, other = rendezvous.started(0, 1)
    rendezvous.complete([one, other], 4)
    rendezvous.quorum.leave(other)
    rendezvous.ready(rendezvous.enter(1), 8, last=4)
    rendezvous.ready(one, 8, last=4)
    assert sorted(rendezvous.answer(one).members) == [0, 1]


def test_who_comes_back_takes_the_state_after_the_next_exchange_and_is_waited_for_from_then_on() -> None:
    rendezvous = Rendezvous(2)
    one, other = rendezvous.started(0, 1)
    rendezvous.quorum.leave(other)
    rendezvous.complete([one], 4)
    back = rendezvous.enter(1)
    rendezvous.quorum.start(back, StartIsland(-1, "d"), rendezvous.now)
    rendezvous.pass_time(2 * PATIENCE)
    assert back.answer is None
    assert rendezvous.complete([one], 8) == [OutcomeAnswer(True, recipients=[1])]
    assert rendezvous.answer(back) == StartAnswer(8, 0, [("10.0.0.1", 1000)], present=[0, 1])
    rendezvous.ready(one, 12)
    rendezvous.pass_time(100)
    assert one.answer is None
    rendezvous.ready(back, 12)
    assert isinstance(one.answer, QuorumAnswer)


def test_a_rendezvous_that_was_started_again_learns_who_is_behind() -> None:
    """One island has heard that exchange 8 is complete, the other has not."""
    rendezvous = Rendezvous(2)
    behind, ahead = rendezvous.enter(0), rendezvous.enter(1)
    rendezvous.ready(behind, 8, last=4)
    attempt = rendezvous.answer(behind).attempt  # alone
    rendezvous.ready(ahead, 12, last=8)
    rendezvous.report(behind, 8, attempt, 1)
    rendezvous.answer(behind)
    rendezvous.ready(behind, 8, last=4)
    assert rendezvous.answer(behind) == QuorumAnswer(is_behind=True)
    assert isinstance(rendezvous.answer(ahead), QuorumAnswer)


def test_who_offers_its_part_when_the_others_have_begun_without_it_is_told_as_soon_as_they_have_completed() -> None:
    """It must not wait for their next exchange, and never complete this one a second time on its own."""
    rendezvous = Rendezvous(2)
    one, other = rendezvous.started(0, 1)
    rendezvous.quorum.leave(other)
    attempt = rendezvous.attempt([one])
    again = rendezvous.enter(1)
    rendezvous.ready(again, 4)
    assert again.answer is None
    rendezvous.report(one, 4, attempt)
    assert rendezvous.answer(one) == OutcomeAnswer(is_complete=True)
    assert rendezvous.answer(again) == QuorumAnswer(is_behind=True)


@pytest.mark.parametrize(
    ("failed", "left_out"),
    [
        ([[1], [0]], 1),
        ([[], [0]], 0),  # it reaches the others, and they do not reach it: attempts were once repeated without end
        ([[], [0], [0]], 0),
        ([[1], [0], []], 1),  # of two that cannot reach each other only one
    ],
)
def test_an_island_that_others_cannot_reach_is_left_out_after_some_attempts(
    failed: list[list[int]], left_out: int
) -> None:
    rendezvous = Rendezvous(len(failed))
    islands = rendezvous.started(*range(len(failed)))
    rendezvous.fail(islands, *failed)
    out = islands.pop(left_out)
    rendezvous.ready(out, 4)
    assert rendezvous.answer(out) == QuorumAnswer(is_behind=True)
    assert rendezvous.complete(islands, 4) == [OutcomeAnswer(is_complete=True)] * len(islands)


def test_an_island_that_comes_after_the_end_is_told() -> None:
    rendezvous = Rendezvous(2)
    [one] = rendezvous.started(0)
    rendezvous.complete([one], 4)
    rendezvous.quorum.leave(one, is_done=True)
    late = rendezvous.enter(1)
    rendezvous.quorum.start(late, StartIsland(-1, "d"), rendezvous.now)
    rendezvous.pass_time(PATIENCE)
    assert isinstance(late.answer, UsageError)
    assert "have trained all steps" in str(late.answer)


def test_wrong_islands_are_refused() -> None:
    rendezvous = Rendezvous(2)
    rendezvous.enter(0)
    with pytest.raises(IslandTakenError, match="give each island its own --island"):
        rendezvous.enter(0)
    with pytest.raises(UsageError, match="differs from the others in recipe"):
        rendezvous.enter(1, recipe="another")
    with pytest.raises(UsageError, match="number them from 0"):
        rendezvous.enter(2)
