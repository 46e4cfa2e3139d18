"""Plots that only the English stories have."""

from __future__ import annotations

from zero2all.storyworld.plots import SHARED_PLOTS, SNACK_SHARE, ending, opening, snack
from zero2all.storyworld.teller import Teller


def trade(t: Teller) -> None:
    o = t.words["o"]
    u = t.word("thing", other_than=[o])
    while u.forms[""] == o.forms[""]:
        u = t.word("thing")
    t.let(u=u)
    opening(t)
    t.tell("own a o")
    t.tell("friend_comes a b")
    t.tell("has_too b u")
    t.tell("like_it a b u")
    t.tell("offer_trade b a o u")
    t.tell("trade a b o u")
    t.maybe("after_trade a b o u")
    if t.chance(0.4):
        t.tell("miss_it a o")
        t.tell("trade_back b a o u")
        t.tell("thank a b")
    else:
        t.tell("glad_both a b")
        t.maybe("play a b")
    if t.chance(SNACK_SHARE):
        snack(t)
    ending(t)


def race(t: Teller) -> None:
    opening(t)
    t.tell("friend_comes a b")
    t.tell("proud b")
    t.tell("challenge b a y")
    t.tell("accept a b")
    t.tell("race_start b a")
    if t.chance(0.5):
        t.tell("race_rest b")
        t.tell("pass a b y")
    else:
        t.tell("race_fall b")
        t.tell("stop_help a b")
        t.tell("both_win a b y")
    t.tell("humble b a")
    if t.chance(SNACK_SHARE):
        snack(t)
    ending(t)


ENGLISH_PLOTS = (*SHARED_PLOTS, trade, race)
