"""The plots that both languages share: each tells what happens, in the order of its sentences.

The sentences are those of the language: its pattern files have a group for each call of `tell`.
"""

from __future__ import annotations

from zero2all.storyworld.teller import ADDENDS, SUBTRAHEND, Teller

SNACK_SHARE = 0.9  # of the stories that can have one


def cast(t: Teller) -> None:
    """Put people, places, things and items into the roles that the plots use."""
    world = "town" if t.chance(0.6) else "forest"
    a = t.word("person", "child", world)
    gender = () if t.chance(0.3) else ("boy" if "girl" in a.tags else "girl",)
    x = t.word("place", "outdoors")
    f = t.word("item", "food")
    t.let(
        a=a, b=t.word("person", "child", world, *gender, other_than=[a]), c=t.word("person", "elder", world),
        x=x, y=t.word("place", "outdoors", other_than=[x]), o=t.word("thing"), f=f,
        g=t.word("item", "food", other_than=[f]),
    )  # fmt: skip


def opening(t: Teller, trait: bool = True) -> None:
    if t.chance(0.5):
        t.tell("open_at a x")
        if trait:
            t.maybe("trait a", 0.4)
    else:
        t.tell("open_lives a x")
        if trait:
            t.maybe("trait a", 0.6)
        t.tell("set_out a x")


def snack(t: Teller, rest: float = 0.6) -> None:
    """The two friends share what they have."""
    t.maybe("rest a b", rest)
    if t.chance(0.6):
        t.let_sum()
        t.tell("sum_two a b f n m k")
    else:
        t.let_halves()
        t.tell("sum_half a b f n k")
    t.maybe("taste a b f")


def fruit(t: Teller) -> None:
    """Two kinds of fruit that are counted together."""
    f = t.word("item", "fruit")
    t.let(f=f, g=t.word("item", "fruit", other_than=[f]))
    t.let_sum()


def ending(t: Teller) -> None:
    if "k" not in t.words and t.chance(SNACK_SHARE):
        snack(t)
    kind = t.choose(("friends", "home", "night", "both"))
    if kind == "friends":
        t.tell("end_friends a b")
    elif kind == "home":
        t.tell("end_home a")
        t.maybe("end_night a", 0.3)
    elif kind == "night":
        t.tell("end_night a")
    else:
        t.tell("end_both a b")


def lost_thing(t: Teller) -> None:
    opening(t)
    t.tell("own a o")
    if moved := t.chance(0.5):
        t.let(x=t.words["y"], y=t.words["x"])
        t.tell("go a x")
    t.tell("lose a o")
    t.maybe("sad a", 0.6)
    t.maybe("search_alone a o", 0.6)
    t.tell("friend_comes a b")
    t.maybe("ask_wrong b a", 0.6)
    t.tell("tell_lost a b o")
    t.tell("offer_help b a")
    if moved or t.chance(0.4):
        t.tell("recall_place a b y")
        t.tell("go_both a b y")
        t.let(x=t.words["y"])
    t.maybe("search a b", 0.7)
    t.tell("find_again b o x")
    t.tell("give_back b a o")
    t.maybe("glad a")
    t.tell("thank a b")
    t.maybe("welcome b a", 0.4)
    if t.chance(SNACK_SHARE):
        snack(t)
    t.tell("keep_safe a o")
    t.maybe("end_friends a b", 0.3)


def found_thing(t: Teller) -> None:
    opening(t)
    t.tell("find_new a o")
    t.tell("whose a o")
    t.tell("ask_elder a c")
    t.tell("elder_knows c a b o y")
    t.tell("go a y")
    t.tell("owner_waits b y")
    t.tell("yours a b o")
    t.tell("mine b o")
    t.tell("give_back a b o")
    t.tell("thank b a")
    if t.chance(0.6):
        t.let_sum()
        t.tell("already a f n")
        t.tell("reward b a f m")
        t.tell("total a f k")
    else:
        t.maybe("play a b")
    t.tell("honest_end a b o")


def broken_thing(t: Teller) -> None:
    t.let(o=t.word("thing", "breakable"))
    opening(t)
    t.tell("own a o")
    t.tell("friend_comes a b")
    t.tell("ask_borrow b a o")
    t.tell("lend a b o")
    t.maybe("careless b", 0.6)
    t.tell("break_it b o")
    if t.chance(0.5):
        t.tell("hide_it b o")
        t.tell("deny a b o")
        t.tell("bad_conscience b")
        t.tell("fetch_it b o")
    else:
        t.maybe("bad_conscience b", 0.4)
    t.tell("confess b a o")
    t.tell("forgive a b")
    t.tell(t.choose(("fix_both a b o", "fix_elder c a o")))
    t.maybe("glad_both a b")
    t.tell("learned b")
    t.maybe("end_both a b", 0.4)


def borrowed_thing(t: Teller) -> None:
    t.let(o=t.word("thing", "useful"))
    opening(t)
    t.tell("own a o")
    t.tell("friend_comes a b")
    t.tell("need b o")
    t.tell("ask_borrow b a o")
    t.tell("lend a b o")
    t.tell("promise b a o")
    t.maybe("play a b", 0.4)
    t.tell("bring_back b a o")
    t.tell("thank b a")
    t.maybe("word_kept a b", 0.8)
    if t.chance(SNACK_SHARE):
        snack(t)
    t.tell("end_friends a b")


def present(t: Teller) -> None:
    t.let(o=t.word("thing", "handmade"))
    opening(t)
    t.tell("birthday b a")
    t.tell("make_gift a o")
    t.tell("wrap a o b")
    t.tell("party a b y")
    if t.chance(0.8):
        t.let_sum()
        t.tell("candles b n m k")
    t.tell("give_gift a b o")
    t.tell("love_gift b o a")
    t.maybe("thank b a")
    t.maybe("play a b", 0.6)
    ending(t)


def rainy_day(t: Teller) -> None:
    opening(t)
    if umbrella := t.chance(0.5):
        t.let(o=t.word("thing", "umbrella"))
        t.tell("own a o")
    t.tell("friend_comes a b")
    t.maybe("play a b")
    t.tell("clouds a x")
    t.tell("rain x")
    if umbrella:
        t.tell("no_cover b")
        t.tell("share_umbrella a b o")
        t.maybe("thank b a")
    else:
        t.tell("shelter a b")
    t.tell("wait_rain a b")
    if t.chance(SNACK_SHARE):
        snack(t)
    t.tell("rain_stops x")
    t.tell("puddles a b")
    ending(t)


def strange_sound(t: Teller) -> None:
    opening(t, trait=False)
    t.tell("dusk a x")
    t.tell("hear a")
    t.tell("fear a")
    t.tell("brave a")
    t.tell("it_is a b")
    t.tell("rescue a b")
    t.tell("thank b a")
    t.maybe("laugh_fear b a", 0.8)
    if t.chance(SNACK_SHARE):
        snack(t)
    t.tell(t.choose(("end_friends a b", "end_night a")))


def lost_way(t: Teller) -> None:
    t.let(o=t.word("thing", "loud"))
    opening(t)
    t.tell("own a o")
    t.tell("chase a y")
    t.tell("no_way a y")
    t.maybe("sad a")
    t.tell("signal a o")
    t.tell("hears b a o")
    t.tell("thank a b")
    if t.chance(SNACK_SHARE):
        snack(t)
    t.tell("lead_home b a")
    t.maybe("end_friends a b")


def hide_and_seek(t: Teller) -> None:
    opening(t)
    t.tell("friend_comes a b")
    t.let(n=t.choose((10, 20)))
    t.tell("seek_start a b n")
    t.tell("hide b")
    t.tell("seek a")
    t.tell("sneeze b a")
    t.tell("found_you a b")
    if t.chance(0.9):
        t.let_sum()
        t.tell("games_won a b n m k")
    if t.chance(SNACK_SHARE):
        snack(t)
    t.maybe("glad_both a b")
    ending(t)


def quarrel(t: Teller) -> None:
    opening(t)
    t.tell("friend_comes a b")
    t.tell("both_see a b o")
    t.tell("quarrel a b o")
    t.tell("angry a b")
    t.tell("elder_comes c a")
    t.tell("advice c a b")
    t.tell("sorry_both a b")
    t.tell("first_turn a b o")
    t.tell("second_turn b a o")
    t.maybe("play a b")
    if t.chance(SNACK_SHARE):
        snack(t)
    ending(t)


def new_friend(t: Teller) -> None:
    opening(t)
    t.tell("own a o")
    t.tell("newcomer b x a")
    t.tell("shy b")
    t.tell("hello a b")
    t.tell("show_thing a b o")
    t.tell("thaw b a")
    t.tell("play a b")
    if t.chance(SNACK_SHARE):
        snack(t)
    t.tell("end_friends a b")


def sharing(t: Teller) -> None:
    greedy = t.chance(0.4)
    opening(t, trait=not greedy)
    t.let_difference()
    t.tell("have a f n")
    if greedy:
        t.tell("greedy a")
    t.tell("friend_comes a b")
    t.tell("hungry b")
    if greedy:
        t.tell("refuse a b f")
        t.tell("spill a f")
        t.tell("sad a")
        t.let_halves()
        t.tell("friend_feeds b a g n k")
        t.tell("ashamed a b")
    else:
        t.tell("share a b f m")
        t.tell("left a f k")
        t.tell("thank b a")
        t.tell("taste a b f")
    t.maybe("play a b")
    ending(t)


def shopping(t: Teller) -> None:
    """A purchase; sometimes the missing coins must be earned first."""
    t.let(o=t.word("thing", "sold"), f=t.word("item", "money"), y=t.word("place", "shop"), work=t.word("work"))
    t.tell("open_lives a x")
    t.maybe("trait a")
    t.tell("want a o")
    t.let_difference()
    if short := t.chance(0.5):
        n, m, k = (t.words[role] for role in "nmk")
        t.let(n=m, m=n, k=k)  # has n, needs m, earns k
    t.tell("coins a f n")
    t.tell("go_shop a y")
    t.tell("shopkeeper c y a")
    t.tell("price c o m a")
    if short:
        t.tell("not_enough a f n m k")
        t.tell("job c a k f work")
        t.tell("earn a k f work")
        t.tell("enough a f m")
        t.tell("buy a o m f")
    else:
        t.tell("buy a o m f")
        t.tell("change a f k")
    t.tell("glad a")
    t.tell("home_with a o")
    t.maybe("end_night a")


def planting(t: Teller) -> None:
    t.let(seeds=t.word("seeds"), season=t.language.words["season"][0])
    opening(t, trait=False)
    t.let_sum()
    t.tell("plant a seeds n m k")
    t.tell("sprout_wait a")
    t.tell("friend_comes a b")
    t.tell("doubt b a")
    t.tell("patient a")
    t.maybe("sprout_wait a")
    t.tell("sprout a k seeds")
    t.let(n=t.number(2, 10))
    t.tell("harvest a b seeds n")
    t.tell("admit b a")
    ending(t)


def helping(t: Teller) -> None:
    fruit(t)
    opening(t)
    t.tell("heavy c a x")
    t.tell("let_help a c")
    t.tell("carry a c y")
    t.maybe("story_time c a", 0.6)
    if t.chance(0.8):
        t.tell("basket c n f m g k")
    t.tell("elder_thanks c a")
    if t.chance(0.6):
        t.let_sum()
        t.tell("already a f n")
        t.tell("reward c a f m")
        t.tell("total a f k")
    t.maybe("glad a")
    t.tell("end_home a")
    t.maybe("end_night a", 0.3)


def collecting(t: Teller) -> None:
    t.let(f=t.word("item", "wild"))
    opening(t)
    n, m = t.choose(ADDENDS), t.choose(ADDENDS)
    t.let(n=n, m=m, k=n + m)
    t.tell("collect_first a n f")
    t.tell("collect_more a m f")
    t.tell("total a f k")
    t.tell("friend_comes a b")
    t.let(n=n + m, m=SUBTRAHEND, k=n + m - SUBTRAHEND)
    if t.chance(0.5):
        t.tell("lose_some a m f")
        t.tell("sad a")
        t.tell("remain a f k")
        t.tell("gift_some b a m f")
        t.tell("total a f n")
        t.tell("thank a b")
    else:
        t.tell("play a b")
    t.tell("make_from a b f")
    t.maybe("glad_both a b", 0.6)
    ending(t)


def lesson(t: Teller) -> None:
    opening(t)
    t.tell("friend_comes a b")
    t.tell("teacher c a x")
    for turn in range(t.number(1, 2)):
        asked, other = ("a", "b") if turn == 0 else ("b", "a")
        if t.chance(0.6):
            t.let_sum()
            t.tell(f"question c {asked} n m")
        else:
            t.let_difference()
            t.tell(f"question_minus c {asked} n m")
        t.tell(f"think {asked}")
        if helped := t.chance(0.7):
            t.tell(f"hint {other} {asked}")
        t.tell(f"answer {asked} k")
        t.tell(f"right c {asked}")
        if helped:
            t.maybe(f"thank {asked} {other}", 0.4)
    t.maybe("play a b", 0.6)
    ending(t)


SHARED_PLOTS = (  # the most frequent first
    sharing, collecting, helping, shopping, lesson, new_friend, strange_sound, lost_way, found_thing, planting,
    lost_thing, borrowed_thing, present, hide_and_seek, quarrel, rainy_day, broken_thing,
)  # fmt: skip
