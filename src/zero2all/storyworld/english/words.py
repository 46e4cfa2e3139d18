"""The words of the English stories."""

from __future__ import annotations

from collections.abc import Iterable

from zero2all.storyworld.grammar import Word

GIRLS = "Mia Lily Nora"
BOYS = "Tom Sam Ben"
ANIMALS = """
Hazel rabbit she | Dot duck she | Bruno bear he | Rusty dog he
"""
ELDERS = "Grandma Rose, she | Grandpa Joe, he | Uncle Bob, he"
ANIMAL_ELDERS = "Old Turtle, he | Mother Hen, she"
# Noun: adjectives that suit it.
# Marks: * can break, ! makes a sound, + can be made by hand, ^ is useful, $ is sold, ~ keeps off the rain.
THINGS = """
kite*+$: red blue yellow green white
ball$: red blue green yellow striped
drum*!+$: red blue little wooden old
scarf+^$: red blue green striped woolen
lantern*+^$: red yellow paper little old
map^: old big secret folded
key: silver golden little rusty
book^$: blue green old little thick
bell*!$: silver golden little brass
flute*!+$: wooden silver little old
boat*+$: wooden red white little paper
box*+$: wooden blue green little round
basket*+^$: brown round little white
umbrella*^$~: red blue yellow green black
hat+^$: red blue green straw woolen
doll*+$: wooden little old rag
whistle*!+$: silver red little wooden
cup*$: blue white green golden
mirror*$: round silver little old
ribbon$: red blue yellow white silk
blanket+^$: blue green woolen striped
watch*^$: golden silver old little
puppet*+$: wooden red little funny
necklace*+$: silver golden blue pearl
pencil^$: red blue yellow green long
spade^$: wooden red blue little
button: red blue golden round
feather: white blue long black
compass*^$: brass old golden little
pillow+$: blue white green soft
"""
LOUD = {"drum": "beat", "bell": "ring", "flute": "play", "whistle": "blow"}
MARKS = {"*": "breakable", "!": "loud", "+": "handmade", "^": "useful", "$": "sold", "~": "umbrella"}
PLACES = """
in: park, forest, meadow, garden
by: lake, river, well
on: hill
"""
SHOPS = "market, toy shop, village shop, corner shop, little shop"
FRUIT = "apples, pears, plums, cherries, peaches, berries"
FOOD = "nuts, carrots, cookies, buns, cakes, pies"
WILD = "stones, flowers, mushrooms, acorns, feathers, leaves, chestnuts, pine cones"
NUMBERS = """
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
twenty
"""
SEEDS = "bean beans, pea peas, pumpkin pumpkins, carrot carrots, melon melons, tomato tomatoes, radish radishes"
TRAITS = "kind, brave, clever, gentle, patient, cheerful, curious, polite, quiet, honest, helpful, careful"

PHRASES = {
    "weather": "sunny, warm, cold, windy, cloudy, bright, cool, foggy, lovely, mild",
    "season": "spring, summer, autumn",
    "sky": "blue, gray, clear, bright, full of white clouds, as blue as the sea",
    "house": "small, tiny, yellow, white, round, cozy, crooked, wooden, pretty, brick",
    "path": "narrow, long, muddy, sandy, quiet, winding, steep, stony, grassy, shady",
    "weekday": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "kin": "grandmother, grandfather, mother, father, aunt, uncle, big sister, big brother, cousin",
    "clothes": "boots, coat, jacket, mittens, shoes, sweater, raincoat, sandals",
    "doing": "playing, singing, resting, dancing, whistling, walking about, looking at the clouds, watching the birds, "
    "drawing a picture, picking flowers, chasing butterflies, counting ants, collecting leaves, running around, "
    "building a tower of stones, listening to the wind, humming a song, practicing handstands, climbing a tree",
    "work": "watering the flowers, sweeping the path, feeding the hens, cutting wood, carrying water, pulling weeds, "
    "painting a fence, digging a hole, picking beans, raking leaves, knitting a sock, fixing a gate",
    "spot": "behind a rock, under a bush, in the tall grass, behind a tree, between two stones, next to an old log, "
    "under a pile of leaves, near an anthill, beside a puddle, at the foot of a tree, behind a fence, among the ferns",
    "junk": "an old shoe, a sleeping snail, a heap of twigs, a lazy beetle, some dry grass, a broken pot, "
    "a rusty nail, a hungry ant, a piece of string, an empty bottle",
    "seat": "rock, log, bench, stone, tree stump, fallen tree",
    "sad": "sad, upset, unhappy, worried, gloomy",
    "glad": "happy, glad, pleased",
    "celebrate": "danced around, jumped up and down, laughed out loud, began to sing, jumped for joy, "
    "did a little dance, turned around three times, began to whistle",
    "like": "a bird in spring, a king, a queen, a bee in summer, a fish in water, a lamb in the sun",
    "song": "happy, funny, little, merry, silly, soft",
    "meal": "breakfast, lunch",
    "sound": "squeak, scratch, rustle, moan, whisper, thump, sniff, cry",
    "color": "red, blue, yellow, white, green, golden, pink, purple",
    "game": "tag, hide-and-seek, catch, leapfrog, pirates, marbles, hopscotch",
    "drink": "milk, tea, cocoa, lemonade, apple juice, hot chocolate",
    "bug": "butterfly, dragonfly, bee, ladybug, beetle, grasshopper",
    "sweet": "honey, jam, cream, sugar, butter, cinnamon",
    "dream": "the sea, the stars, a flying horse, a friendly dragon, a boat on a river, a mountain of cake, the moon",
    "food": "apples, pears, plums, nuts, cookies, buns, carrots, cherries",
    "counters": "beans, pebbles, nuts, sticks, buttons, peas",
    "hurt": "knee, elbow, foot, hand, nose, toe",
}  # fmt: skip


def _plain(text: str) -> Word:
    return Word(text, {"": text, "Cap": text[0].upper() + text[1:], "a": f"{article(text)} {text}"})


def article(text: str) -> str:
    """`a` or `an`, by the sound that follows."""
    return "an" if text[0] in "aeiou" or text.startswith("honest") else "a"


def _person(name: str, pronoun: str, kid: str, full: str, *tags: str) -> Word:
    him, his = ("her", "her") if pronoun == "she" else ("him", "his")
    forms = {
        "": name, "full": full, "kid": kid, "akid": f"a little {kid}", "he": pronoun, "him": him, "his": his,
        "himself": f"{him}self", "He": pronoun.capitalize(), "His": his.capitalize(), "they": "they",
    }  # fmt: skip
    return Word(name, forms, frozenset({*tags, "girl" if pronoun == "she" else "boy"}))


def _people() -> Iterable[Word]:
    yield from (_person(name, "she", "girl", name, "child", "town") for name in GIRLS.split())
    yield from (_person(name, "he", "boy", name, "child", "town") for name in BOYS.split())
    for entry in _entries(ANIMALS):
        name, species, pronoun = entry.split()
        yield _person(name, pronoun, species, f"{name} the {species}", "child", "forest")
    for text, world in ((ELDERS, "town"), (ANIMAL_ELDERS, "forest")):
        for entry in _entries(text):
            name, pronoun = entry.split(", ")
            yield _person(name, pronoun, "woman" if pronoun == "she" else "man", name, "elder", world)


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.replace("\n", "|").split("|") if entry.strip()]


def _things() -> Iterable[Word]:
    for entry in _entries(THINGS):
        marked, adjectives = entry.split(":")
        noun = marked.rstrip("".join(MARKS))
        tags = {tag for mark, tag in MARKS.items() if mark in marked}
        for adjective in adjectives.split():
            full = f"{adjective} {noun}"
            forms = {"": noun, "full": full, "a": f"{article(full)} {full}", "an": f"{article(noun)} {noun}"}
            if noun in LOUD:
                forms["play"] = LOUD[noun]
            yield Word(full, forms, frozenset({noun, *tags}))


def _places() -> Iterable[Word]:
    for entry in _entries(PLACES):
        preposition, nouns = entry.split(": ")
        for noun in nouns.split(", "):
            at = f"{preposition} the {noun}"
            yield Word(noun, {"": f"the {noun}", "at": at, "At": at.capitalize()}, frozenset({"outdoors"}))
    for noun in SHOPS.split(", "):
        yield Word(noun, {"": f"the {noun}", "at": f"at the {noun}", "At": f"At the {noun}"}, frozenset({"shop"}))


def _items() -> Iterable[Word]:
    for text, *tags in ((FRUIT, "food", "fruit"), (FOOD, "food"), (WILD, "wild"), ("coins", "money")):
        yield from (_plain(item)._replace(tags=frozenset(tags)) for item in text.split(", "))


def _seeds() -> Iterable[Word]:
    for entry in SEEDS.split(", "):
        seed, plural = entry.split()
        yield Word(seed, {"": seed, "pl": plural})


def _numbers() -> Iterable[Word]:
    for number, text in enumerate(NUMBERS.split(), 2):
        yield Word(str(number), {"": text, "Cap": text.capitalize()})


def english_words() -> dict[str, tuple[Word, ...]]:
    """All words by kind."""
    return {
        "person": tuple(_people()),
        "thing": tuple(_things()),
        "place": tuple(_places()),
        "item": tuple(_items()),
        "number": tuple(_numbers()),
        "trait": tuple(_plain(trait) for trait in TRAITS.split(", ")),
        "seeds": tuple(_seeds()),
        "they": (Word("they", {"": "they", "Cap": "They"}),),
        "part": (_plain("morning"), _plain("afternoon")),
        **{kind: tuple(_plain(text) for text in phrases.split(", ")) for kind, phrases in PHRASES.items()},
    }
