"""The plots: each tells what happens, in the order of its sentences. Most are the same in both languages.

The sentences come from the language: its pattern files have a group for each call of `tell`.
"""

from __future__ import annotations

from collections.abc import Callable

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
        a=a,
        b=t.word("person", "child", world, *gender, other_than=[a]),
        c=t.word("person", "elder", world),
        x=x,
        y=t.word("place", "outdoors", other_than=[x]),
        o=t.word("thing"),
        f=f,
        g=t.word("item", "food", other_than=[f]),
    )


def scene(t: Teller, steps: str) -> None:
    """Tell what happens: `own a o; sad a? 0.6; snack` is a sentence, an optional one, and a scene of `SCENES`."""
    for step in steps.split("; "):
        call, optional, probability = step.partition("?")
        if call in SCENES:
            SCENES[call](t)
        elif optional:
            t.maybe(call, float(probability or 0.5))
        else:
            t.tell(call)


def opening(t: Teller, *, trait: bool = True) -> None:
    if t.chance(0.5):
        scene(t, "open_at a x; trait a? 0.4" if trait else "open_at a x")
    else:
        scene(t, "open_lives a x; trait a? 0.6; set_out a x" if trait else "open_lives a x; set_out a x")


def snack(t: Teller, rest: float = 0.6) -> None:
    """The two friends share what they have."""
    t.maybe("rest a b", rest)
    if t.chance(0.6):
        t.let_sum()
        scene(t, "sum_two a b f n m k")
    else:
        t.let_halves()
        scene(t, "sum_half a b f n k")
    scene(t, "taste a b f?")


def maybe_snack(t: Teller) -> None:
    if t.chance(SNACK_SHARE):
        snack(t)


def fruit(t: Teller) -> None:
    """Two kinds of fruit that are counted together."""
    f = t.word("item", "fruit")
    t.let(f=f, g=t.word("item", "fruit", other_than=[f]))
    t.let_sum()


def ending(t: Teller) -> None:
    if "k" not in t.words:
        maybe_snack(t)
    scene(t, t.choose(("end_friends a b", "end_home a; end_night a? 0.3", "end_night a", "end_both a b")))


SCENES: dict[str, Callable[[Teller], None]] = {"opening": opening, "snack": maybe_snack, "ending": ending}


def lost_thing(t: Teller) -> None:
    scene(t, "opening; own a o")
    if moved := t.chance(0.5):
        t.let(x=t.words["y"], y=t.words["x"])
        scene(t, "go a x")
    scene(t, "lose a o; sad a? 0.6; search_alone a o? 0.6; friend_comes a b; ask_wrong b a? 0.6; tell_lost a b o")
    scene(t, "offer_help b a")
    if moved or t.chance(0.4):
        scene(t, "recall_place a b y; go_both a b y")
        t.let(x=t.words["y"])
    scene(t, "search a b? 0.7; find_again b o x; give_back b a o; glad a?; thank a b; welcome b a? 0.4; snack")
    scene(t, "keep_safe a o; end_friends a b? 0.3")


def found_thing(t: Teller) -> None:
    scene(t, "opening; find_new a o; whose a o; ask_elder a c; elder_knows c a b o y; go a y; owner_waits b y")
    scene(t, "yours a b o; mine b o; give_back a b o; thank b a")
    if t.chance(0.6):
        t.let_sum()
        scene(t, "already a f n; reward b a f m; total a f k")
    else:
        scene(t, "play a b?")
    scene(t, "honest_end a b o")


def broken_thing(t: Teller) -> None:
    t.let(o=t.word("thing", "breakable"))
    scene(t, "opening; own a o; friend_comes a b; ask_borrow b a o; lend a b o; careless b? 0.6; break_it b o")
    if t.chance(0.5):
        scene(t, "hide_it b o; deny a b o; bad_conscience b; fetch_it b o")
    else:
        scene(t, "bad_conscience b? 0.4")
    scene(t, "confess b a o; forgive a b")
    t.tell(t.choose(("fix_both a b o", "fix_elder c a o")))
    scene(t, "glad_both a b?; learned b; end_both a b? 0.4")


def borrowed_thing(t: Teller) -> None:
    t.let(o=t.word("thing", "useful"))
    scene(t, "opening; own a o; friend_comes a b; need b o; ask_borrow b a o; lend a b o; promise b a o; play a b? 0.4")
    scene(t, "bring_back b a o; thank b a; word_kept a b? 0.8; snack; end_friends a b")


def present(t: Teller) -> None:
    t.let(o=t.word("thing", "handmade"))
    scene(t, "opening; birthday b a; make_gift a o; wrap a o b; party a b y")
    if t.chance(0.8):
        t.let_sum()
        scene(t, "candles b n m k")
    scene(t, "give_gift a b o; love_gift b o a; thank b a?; play a b? 0.6; ending")


def rainy_day(t: Teller) -> None:
    scene(t, "opening")
    if umbrella := t.chance(0.5):
        t.let(o=t.word("thing", "umbrella"))
        scene(t, "own a o")
    scene(t, "friend_comes a b; play a b?; clouds a x; rain x")
    if umbrella:
        scene(t, "no_cover b; share_umbrella a b o; thank b a?")
    else:
        scene(t, "shelter a b")
    scene(t, "wait_rain a b; snack; rain_stops x; puddles a b; ending")


def strange_sound(t: Teller) -> None:
    opening(t, trait=False)
    scene(t, "dusk a x; hear a; fear a; brave a; it_is a b; rescue a b; thank b a; laugh_fear b a? 0.8; snack")
    t.tell(t.choose(("end_friends a b", "end_night a")))


def lost_way(t: Teller) -> None:
    t.let(o=t.word("thing", "loud"))
    scene(t, "opening; own a o; chase a y; no_way a y; sad a?; signal a o; hears b a o; thank a b; snack")
    scene(t, "lead_home b a; end_friends a b?")


def hide_and_seek(t: Teller) -> None:
    scene(t, "opening; friend_comes a b")
    t.let(n=t.choose((10, 20)))
    scene(t, "seek_start a b n; hide b; seek a; sneeze b a; found_you a b")
    if t.chance(0.9):
        t.let_sum()
        scene(t, "games_won a b n m k")
    scene(t, "snack; glad_both a b?; ending")


def quarrel(t: Teller) -> None:
    scene(t, "opening; friend_comes a b; both_see a b o; quarrel a b o; angry a b; elder_comes c a; advice c a b")
    scene(t, "sorry_both a b; first_turn a b o; second_turn b a o; play a b?; snack; ending")


def new_friend(t: Teller) -> None:
    scene(t, "opening; own a o; newcomer b x a; shy b; hello a b; show_thing a b o; thaw b a; play a b; snack")
    scene(t, "end_friends a b")


def sharing(t: Teller) -> None:
    greedy = t.chance(0.4)
    opening(t, trait=not greedy)
    t.let_difference()
    scene(t, "have a f n")
    if greedy:
        scene(t, "greedy a")
    scene(t, "friend_comes a b; hungry b")
    if greedy:
        scene(t, "refuse a b f; spill a f; sad a")
        t.let_halves()
        scene(t, "friend_feeds b a g n k; ashamed a b")
    else:
        scene(t, "share a b f m; left a f k; thank b a; taste a b f")
    scene(t, "play a b?; ending")


def shopping(t: Teller) -> None:
    """A purchase; sometimes the missing coins must be earned first."""
    t.let(o=t.word("thing", "sold"), f=t.word("item", "money"), y=t.word("place", "shop"), work=t.word("work"))
    scene(t, "open_lives a x; trait a?; want a o")
    t.let_difference()
    if short := t.chance(0.5):
        n, m, k = (t.words[role] for role in "nmk")
        t.let(n=m, m=n, k=k)  # has n, needs m, earns k
    scene(t, "coins a f n; go_shop a y; shopkeeper c y a; price c o m a")
    if short:
        scene(t, "not_enough a f n m k; job c a k f work; earn a k f work; enough a f m; buy a o m f")
    else:
        scene(t, "buy a o m f; change a f k")
    scene(t, "glad a; home_with a o; end_night a?")


def planting(t: Teller) -> None:
    t.let(seeds=t.word("seeds"), season=t.language.words["season"][0])
    opening(t, trait=False)
    t.let_sum()
    scene(t, "plant a seeds n m k; sprout_wait a; friend_comes a b; doubt b a; patient a; sprout_wait a?")
    scene(t, "sprout a k seeds")
    t.let(n=t.number(2, 10))
    scene(t, "harvest a b seeds n; admit b a; ending")


def helping(t: Teller) -> None:
    fruit(t)
    scene(t, "opening; heavy c a x; let_help a c; carry a c y; story_time c a? 0.6")
    if t.chance(0.8):
        scene(t, "basket c n f m g k")
    scene(t, "elder_thanks c a")
    if t.chance(0.6):
        t.let_sum()
        scene(t, "already a f n; reward c a f m; total a f k")
    scene(t, "glad a?; end_home a; end_night a? 0.3")


def collecting(t: Teller) -> None:
    t.let(f=t.word("item", "wild"))
    scene(t, "opening")
    n, m = t.choose(ADDENDS), t.choose(ADDENDS)
    t.let(n=n, m=m, k=n + m)
    scene(t, "collect_first a n f; collect_more a m f; total a f k; friend_comes a b")
    t.let(n=n + m, m=SUBTRAHEND, k=n + m - SUBTRAHEND)
    if t.chance(0.5):
        scene(t, "lose_some a m f; sad a; remain a f k; gift_some b a m f; total a f n; thank a b")
    else:
        scene(t, "play a b")
    scene(t, "make_from a b f; glad_both a b? 0.6; ending")


def lesson(t: Teller) -> None:
    scene(t, "opening; friend_comes a b; teacher c a x")
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
    scene(t, "play a b? 0.6; ending")


def trade(t: Teller) -> None:
    o = t.words["o"]
    u = t.word("thing", other_than=[o])
    while u.forms[""] == o.forms[""]:
        u = t.word("thing")
    t.let(u=u)
    scene(t, "opening; own a o; friend_comes a b; has_too b u; like_it a b u; offer_trade b a o u; trade a b o u")
    scene(t, "after_trade a b o u?")
    if t.chance(0.4):
        scene(t, "miss_it a o; trade_back b a o u; thank a b")
    else:
        scene(t, "glad_both a b; play a b?")
    scene(t, "snack; ending")


def race(t: Teller) -> None:
    scene(t, "opening; friend_comes a b; proud b; challenge b a y; accept a b; race_start b a")
    if t.chance(0.5):
        scene(t, "race_rest b; pass a b y")
    else:
        scene(t, "race_fall b; stop_help a b; both_win a b y")
    scene(t, "humble b a; snack; ending")


def stuck_kite(t: Teller) -> None:
    t.let(o=t.word("thing", "风筝"))
    scene(t, "opening; own a o; fly a o; stuck a o; reach_fail a o; friend_comes a b; ask_wrong b a?; idea b a")
    scene(t, "reach b o a; give_back b a o; thank a b; fly_both a b o; glad_both a b?; snack; ending")


def crossing(t: Teller) -> None:
    scene(t, "opening; river a y; deep b a; shallow c a; puzzled a b c; try_self a; cross a y; river_end a")
    scene(t, "end_home a? 0.7")


def contest(t: Teller) -> None:
    t.let(sport=t.word("sport"))
    scene(t, "opening; friend_comes a b; contest a b sport")
    if t.chance(0.6):
        scene(t, "lose_first a b; practice a sport; rematch a b")
    t.let_sum()
    scene(t, "two_rounds a n m k?")
    t.let(n=t.words["n"], m=t.words["k"], k=t.words["m"])
    scene(t, "win_by a b n m k; admire b a; snack; ending")


def sick_friend(t: Teller) -> None:
    fruit(t)
    scene(t, "opening; sick b a; bring_fruit a n f m g k; visit a b; comfort a b; comfort a b? 0.6; moved b a")
    scene(t, "welcome a b?; recover b a; end_friends a b?")


def festival(t: Teller) -> None:
    t.let(riddle=t.word("riddle"))
    scene(t, "festival a x; trait a?; friend_comes a b")
    t.let_sum()
    scene(t, "hang a b n m k; riddler c a; riddle c a riddle; ponder a; guess a riddle; praise c a")
    snack(t, rest=0)
    scene(t, "moon a b x")
    t.tell(t.choose(("end_friends a b", "end_night a")))


SHARED_PLOTS = (  # the most frequent first
    sharing, collecting, helping, shopping, lesson, new_friend, strange_sound, lost_way, found_thing, planting,
    lost_thing, borrowed_thing, present, hide_and_seek, quarrel, rainy_day, broken_thing,
)  # fmt: skip
ENGLISH_PLOTS = (*SHARED_PLOTS, trade, race)
CHINESE_PLOTS = (*SHARED_PLOTS, stuck_kite, crossing, contest, sick_friend, festival)
