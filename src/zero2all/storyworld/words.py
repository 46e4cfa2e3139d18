"""The words of each language with their forms, made from the lists of its `words.toml`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero2all.storyworld.grammar import Word

ITEM_TAGS = {"fruit": ("food", "fruit")}  # other items have one tag
DIGITS = "零一二三四五六七八九"

Lists = dict[str, Any]
Words = dict[str, tuple[Word, ...]]


def english_words(lists: Lists) -> Words:
    """All words by kind."""
    return {
        "person": tuple(_english_person(**one) for one in lists["person"]),
        "thing": tuple(_english_things(lists["thing"])),
        "place": tuple(_english_places(lists["place"])),
        "item": tuple(
            _english(item, *ITEM_TAGS.get(kind, (kind,))) for kind, items in lists["item"].items() for item in items
        ),
        "number": tuple(
            Word(str(number), {"": text, "Cap": text.capitalize()}) for number, text in enumerate(lists["number"], 2)
        ),
        "trait": tuple(map(_english, lists["trait"])),
        "seeds": tuple(Word(seed, {"": seed, "pl": plural}) for seed, plural in lists["seeds"].items()),
        "they": (Word("they", {"": "they", "Cap": "They"}),),
        "part": (_english("morning"), _english("afternoon")),
        **{kind: tuple(map(_english, phrases)) for kind, phrases in lists["phrase"].items()},
    }


def _english(text: str, *tags: str) -> Word:
    return Word(text, {"": text, "Cap": text[0].upper() + text[1:], "a": _with_article(text)}, frozenset(tags))


def _with_article(text: str) -> str:
    """After `a` or `an`, by the sound that follows."""
    return f"{'an' if text[0] in 'aeiou' or text.startswith('honest') else 'a'} {text}"


def _english_person(name: str, pronoun: str, tags: list[str], species: str | None = None) -> Word:
    girl = pronoun == "she"
    kid = species or (("girl" if girl else "boy") if "child" in tags else ("woman" if girl else "man"))
    him, his = ("her", "her") if girl else ("him", "his")
    forms = {
        "": name, "full": f"{name} the {species}" if species else name, "kid": kid, "akid": f"a little {kid}",
        "he": pronoun, "him": him, "his": his, "himself": f"{him}self", "He": pronoun.capitalize(),
        "His": his.capitalize(), "they": "they",
    }  # fmt: skip
    return Word(name, forms, frozenset({*tags, "girl" if girl else "boy"}))


def _english_things(things: Lists) -> Iterable[Word]:
    for noun, about in things.items():
        for adjective in about["adjectives"].split():
            full = f"{adjective} {noun}"
            forms = {"": noun, "full": full, "a": _with_article(full), "an": _with_article(noun)}
            yield _thing(full, noun, forms, about)


def _thing(full: str, noun: str, forms: dict[str, str], about: Lists) -> Word:
    sound = {"play": about["play"]} if "play" in about else {}
    return Word(full, {**forms, **sound}, frozenset({noun, *about.get("tags", "").split()}))


def _english_places(places: Lists) -> Iterable[Word]:
    for kind, nouns in places.items():
        preposition, tag = ("at", "shop") if kind == "shop" else (kind, "outdoors")
        for noun in nouns:
            at = f"{preposition} the {noun}"
            yield Word(noun, {"": f"the {noun}", "at": at, "At": at.capitalize()}, frozenset({tag}))


def chinese_words(lists: Lists) -> Words:
    """All words by kind."""
    return {
        "person": tuple(_chinese_person(**one) for one in lists["person"]),
        "thing": tuple(_chinese_things(lists["thing"])),
        "place": tuple(_chinese_places(lists["place"])),
        "item": tuple(
            Word(noun, {"": noun, "m": measure}, frozenset(ITEM_TAGS.get(kind, (kind,))))
            for kind, items in lists["item"].items()
            for noun, measure in items.items()
        ),
        "number": tuple(map(_chinese_number, range(2, 21))),
        "trait": tuple(map(_chinese, lists["trait"])),
        "seeds": tuple(
            Word(noun, {"": noun, "m": measure, "out": out}) for noun, (measure, out) in lists["seeds"].items()
        ),
        "riddle": tuple(Word(text, {"": text, "answer": answer}) for text, answer in lists["riddle"].items()),
        "they": tuple(map(_chinese, ("他们", "她们", "它们"))),
        "part": (Word("morning", {"": "早晨"}), Word("afternoon", {"": "下午"})),
        **{kind: tuple(map(_chinese, phrases)) for kind, phrases in lists["phrase"].items()},
    }


def _chinese(text: str) -> Word:
    return Word(text, {"": text})


def _chinese_person(name: str, pronoun: str, tags: list[str], measure: str | None = None) -> Word:
    genders = {"她": ("girl",), "他": ("boy",), "它": ("girl", "boy")}[pronoun]  # an animal may be either
    kid, intro = "老人", name
    if "child" in tags:
        kid = "小家伙" if measure else "孩子"
        intro = f"一{measure}{name}" if measure else f"一个叫{name}的{'女孩' if pronoun == '她' else '男孩'}"
    forms = {"": name, "kid": kid, "intro": intro, "he": pronoun, "He": pronoun, "they": f"{pronoun}们"}
    return Word(name, forms, frozenset({*tags, *genders}))


def _chinese_things(things: Lists) -> Iterable[Word]:
    for noun, about in things.items():
        m = about["measure"]
        for full in about["names"].split():
            forms = {
                "": noun, "full": full, "m": m, "one": f"一{m}{full}", "that": f"那{m}{noun}", "this": f"这{m}{noun}",
            }  # fmt: skip
            yield _thing(full, noun, forms, about)


def _chinese_places(places: Lists) -> Iterable[Word]:
    for tag, entries in places.items():
        for forms in entries:
            yield Word(forms[0], dict(zip(("", "at", "live"), forms, strict=False)), frozenset({tag}))


def _chinese_number(number: int) -> Word:
    """`math` is the form for sums; before a measure word, two has a form of its own."""
    tens, ones = divmod(number, 10)
    text = ("" if tens == 0 else "十" if tens == 1 else f"{DIGITS[tens]}十") + (DIGITS[ones] if ones else "")
    return Word(str(number), {"": "两" if number == 2 else text, "math": text})
