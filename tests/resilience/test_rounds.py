"""What the rendezvous decides, with a clock that the test turns."""

from __future__ import annotations

import random

import pytest

from zero2all.errors import UsageError
from zero2all.resilience.rounds import Node, Rounds, Rules, Seat

SETTLED = 11.0


class World:
    """Nodes that come, wait, beat and go as the test says."""

    def __init__(self, *counts: int) -> None:
        self.rounds, self.now = Rounds(Rules(counts)), 0.0
        self.seats: dict[str, Seat] = {}

    def come(self, *names: str) -> None:
        for name in names:
            self.rounds.enter(Node(name, name, f"10.0.0.{int(name)}", pid=1, procs=2), self.now)
            self.wait(name)

    def wait(self, *names: str, failed: bool = False) -> None:
        for name in names:
            self.rounds.wait(name, 4000 + int(name), self.now, failed)
        self.pass_time(0.0)

    def pass_time(self, seconds: float, silent: tuple[str, ...] = ()) -> None:
        end = self.now + seconds
        while True:
            for name in self.rounds.nodes.keys() - set(silent):
                self.rounds.hear(name, self.now)
            self.seats |= self.rounds.step(self.now)
            if self.now >= end:
                return
            self.now = min(end, self.now + 1.0)

    def ranks(self) -> dict[str, int]:
        number = self.rounds.number
        return {name: seat.rank for name, seat in self.seats.items() if seat.round == number}


def test_all_that_may_come_have_come() -> None:
    world = World(2)
    world.come("9")
    assert world.seats == {}
    world.come("10")
    assert world.ranks() == {"9": 0, "10": 1}, "by address, as a number"
    assert [world.seats[name].first_rank for name in ("9", "10")] == [0, 2]
    assert {(seat.ranks, seat.master, seat.port) for seat in world.seats.values()} == {(4, "10.0.0.9", 4009)}


def test_ranks_do_not_depend_on_who_comes_first() -> None:
    names = [str(number) for number in range(1, 40)]
    for seed in range(5):
        world = World(39)
        world.come(*random.Random(seed).sample(names, len(names)))
        assert world.ranks() == {name: number for number, name in enumerate(names)}


def test_nodes_that_come_within_a_minute_are_one_round() -> None:
    """A thousand nodes that start over a minute were restarted in waves of three seconds."""
    world = World(*range(1, 1001))
    order = random.Random(1).sample(range(1, 201), 200)
    for number in order[:60]:
        world.come(str(number))
        world.pass_time(0.25)
    assert world.rounds.number == 0
    world.pass_time(SETTLED)
    assert (world.rounds.number, len(world.ranks())) == (1, 60)
    for number in order[60:]:  # late by a lot: they are taken in together
        world.come(str(number))
        assert not world.rounds.status().change
        world.pass_time(0.25)
    world.pass_time(SETTLED)
    assert world.rounds.status().change
    world.wait(*list(world.ranks()))
    assert (world.rounds.number, len(world.ranks())) == (2, 200)


def test_a_trickle_of_nodes_cannot_put_the_start_off_for_ever() -> None:
    world = World(*range(1, 1001))
    for number in range(1, 15):
        world.come(str(number))
        world.pass_time(8.0)
    assert world.rounds.number == 1


def test_a_node_that_is_silent_is_lost_and_its_peers_are_told() -> None:
    world = World(1, 2)
    world.come("1", "2")
    world.pass_time(9.0, silent=("2",))
    assert world.rounds.status().lost == ()
    world.pass_time(3.0, silent=("2",))
    assert world.rounds.status().lost == ("2 (10.0.0.2)",)
    world.wait("1", failed=True)
    world.pass_time(4.0)
    assert (world.rounds.number, world.ranks()) == (2, {"1": 0})
    assert world.rounds.status().lost == ()


def test_a_rendezvous_that_was_asleep_buries_nobody() -> None:
    world = World(2)
    world.come("1", "2")
    world.now += 3600.0
    assert world.rounds.step(world.now) == {}
    assert world.rounds.status().lost == ()
    assert len(world.rounds.nodes) == 2


def test_a_node_that_leaves_with_notice_is_not_lost() -> None:
    world = World(1, 2)
    world.come("1", "2")
    world.rounds.leave("2", politely=True)
    assert (world.rounds.status().change, world.rounds.status().lost) == (True, ())
    world.wait("1")
    world.pass_time(4.0)
    assert world.ranks() == {"1": 0}


def test_members_that_come_back_as_they_were_told_are_not_lost() -> None:
    world = World(1, 2, 3)
    world.come("1", "2")
    world.pass_time(SETTLED)
    world.come("3")
    assert world.rounds.status().change, "that makes all"
    world.wait("1")
    assert world.rounds.status().lost == (), "the second is saving"
    world.wait("2")
    assert world.ranks() == {"1": 0, "2": 1, "3": 2}


def test_a_failure_brings_all_back_at_once() -> None:
    world = World(1, 2, 3)
    world.come("1", "2")
    world.pass_time(SETTLED)
    world.wait("2", failed=True)
    assert world.rounds.status().lost == ("2 (10.0.0.2)",)
    world.wait("1", failed=True)
    assert world.rounds.number == 2, "nobody is missing, so nobody is waited for"


def test_the_loss_of_a_member_while_a_round_forms() -> None:
    """Whoever it is: the first of the order has no special part to play."""
    for lost in ("1", "2", "3"):
        world = World(2, 3)
        world.come("1", "2", "3")
        world.wait("1", failed=True)
        world.rounds.leave(lost, politely=False)
        for name in sorted({"1", "2", "3"} - {lost}):
            world.wait(name, failed=True)
        world.pass_time(4.0)
        assert (world.rounds.number, len(world.ranks())) == (2, 2)


def test_a_node_that_the_layout_has_no_use_for_waits() -> None:
    """Sixteen ranks a group on nodes of eight: of three nodes two can work."""
    world = World(2, 4)
    world.come("1", "2", "3", "4")
    assert world.rounds.number == 1
    world.rounds.leave("2", politely=False)
    world.wait("1", "3", "4", failed=True)
    world.pass_time(4.0)
    assert world.ranks() == {"1": 0, "3": 1}
    world.pass_time(2 * SETTLED)
    assert not world.rounds.status().change, "the spare is no reason to start again"
    world.come("2")
    assert world.rounds.status().change
    world.wait("1", "3")
    assert world.ranks() == {"1": 0, "2": 1, "3": 2, "4": 3}


def test_too_few_wait_for_others_and_a_spare_takes_the_place_of_a_lost_one() -> None:
    world = World(2, 4)
    world.come("1", "2")
    world.pass_time(SETTLED)
    world.come("3")
    world.rounds.leave("1", politely=False)
    world.wait("2", failed=True)
    world.pass_time(4.0)
    assert world.ranks() == {"2": 0, "3": 1}
    world.rounds.leave("3", politely=False)
    world.wait("2", failed=True)
    world.pass_time(100.0)
    assert world.rounds.status().running == 0


def test_one_bad_node_is_known_from_a_bad_step() -> None:
    world = World(2, 3)
    world.come("1", "2", "3")
    assert world.rounds.fail("3", step=7) == (2, False)
    world.rounds.leave("3", politely=True)
    assert world.rounds.fail("2", step=9) == (0, False), "too few would be left"
    assert world.rounds.fail("2", step=7)[1], "it fails on others too"


def test_closing_is_for_all_and_the_first_word_counts() -> None:
    world = World(1, 2)
    world.come("1")
    world.rounds.close("done")
    world.rounds.close("failed")
    world.pass_time(100.0)
    assert (world.rounds.number, world.rounds.status().closed) == (0, "done")


def test_rules_without_numbers_are_wrong() -> None:
    for counts in ((), (0, 1), (3, 2)):
        with pytest.raises(UsageError):
            Rules(counts)
