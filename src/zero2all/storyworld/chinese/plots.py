"""Plots that only the Chinese stories have."""

from __future__ import annotations

from zero2all.storyworld.plots import SHARED_PLOTS, SNACK_SHARE, ending, fruit, opening, snack
from zero2all.storyworld.teller import Teller


def stuck_kite(t: Teller) -> None:
    t.let(o=t.word("thing", "风筝"))
    opening(t)
    t.tell("own a o")
    t.tell("fly a o")
    t.tell("stuck a o")
    t.tell("reach_fail a o")
    t.tell("friend_comes a b")
    t.maybe("ask_wrong b a")
    t.tell("idea b a")
    t.tell("reach b o a")
    t.tell("give_back b a o")
    t.tell("thank a b")
    t.tell("fly_both a b o")
    t.maybe("glad_both a b")
    if t.chance(SNACK_SHARE):
        snack(t)
    ending(t)


def crossing(t: Teller) -> None:
    opening(t)
    t.tell("river a y")
    t.tell("deep b a")
    t.tell("shallow c a")
    t.tell("puzzled a b c")
    t.tell("try_self a")
    t.tell("cross a y")
    t.tell("river_end a")
    t.maybe("end_home a", 0.7)


def contest(t: Teller) -> None:
    t.let(sport=t.word("sport"))
    opening(t)
    t.tell("friend_comes a b")
    t.tell("contest a b sport")
    if t.chance(0.6):
        t.tell("lose_first a b")
        t.tell("practice a sport")
        t.tell("rematch a b")
    t.let_sum()
    t.maybe("two_rounds a n m k")
    t.let(n=t.words["n"], m=t.words["k"], k=t.words["m"])
    t.tell("win_by a b n m k")
    t.tell("admire b a")
    if t.chance(SNACK_SHARE):
        snack(t)
    ending(t)


def sick_friend(t: Teller) -> None:
    fruit(t)
    opening(t)
    t.tell("sick b a")
    t.tell("bring_fruit a n f m g k")
    t.tell("visit a b")
    t.tell("comfort a b")
    t.maybe("comfort a b", 0.6)
    t.tell("moved b a")
    t.maybe("welcome a b")
    t.tell("recover b a")
    t.maybe("end_friends a b")


def festival(t: Teller) -> None:
    t.let(riddle=t.word("riddle"))
    t.tell("festival a x")
    t.maybe("trait a")
    t.tell("friend_comes a b")
    t.let_sum()
    t.tell("hang a b n m k")
    t.tell("riddler c a")
    t.tell("riddle c a riddle")
    t.tell("ponder a")
    t.tell("guess a riddle")
    t.tell("praise c a")
    snack(t, rest=0)
    t.tell("moon a b x")
    t.tell(t.choose(("end_friends a b", "end_night a")))


CHINESE_PLOTS = (*SHARED_PLOTS, stuck_kite, crossing, contest, sick_friend, festival)
