"""What the engine knows about a language: its words, patterns and plots, and where its sentences end.

The words with their forms are made from the lists of its `words.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from zero2all.base.package_data import read_package_table
from zero2all.storyworld.grammar import Group, Parser, Word, read_groups

if TYPE_CHECKING:
    from zero2all.storyworld.teller import Teller
from collections.abc import Iterable

PACKAGE = "zero2all.storyworld"
MAX_SENTENCE = 300  # characters; the longest sentence of the grammar is about half as long
_ENDS = ".!?。！？"
_MARKS = re.compile(r'[.!?。！？"“”]')


def read_toml(language: str, name: str) -> dict[str, Any]:
    """A data file of a language: its words, or the phrases of its conversations."""
    return read_package_table(PACKAGE, f"{language}/{name}.toml")


@dataclass(frozen=True)
class Language:
    """A language of the story world."""

    name: str  # also of the directory of its words, phrases and sentence patterns
    words: Mapping[str, tuple[Word, ...]]
    plots: tuple[Callable[[Teller], None], ...]
    separator: str  # between sentences
    length: tuple[int, int]  # of a story, in words or characters
    measure: Callable[[str], int]  # the length of a story

    @cached_property
    def groups(self) -> Mapping[str, Group]:
        """All groups of patterns by name."""
        groups: dict[str, Group] = {}
        for file in sorted((files(PACKAGE) / self.name).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".txt"):
                more = read_groups(file.read_text(encoding="utf-8"), complete_sentences)
                assert not groups.keys() & more.keys(), f"groups of {file.name} are defined twice"
                groups |= more
        return groups

    @cached_property
    def people(self) -> Mapping[str, Word]:
        """All characters by name."""
        return {word.id: word for word in self.words["person"]}

    @cached_property
    def names(self) -> re.Pattern[str]:
        """Finds the names of characters in any text."""
        names = "|".join(sorted(map(re.escape, self.people), key=len, reverse=True))
        return re.compile(rf"\b(?:{names})\b" if self.separator else names)

    @cached_property
    def numbers(self) -> Mapping[int, Word]:
        """The words of the numbers."""
        return {int(word.id): word for word in self.words["number"]}

    @cached_property
    def _tagged(self) -> dict[tuple[str, ...], tuple[Word, ...]]:
        return {}

    def tagged(self, kind: str, *tags: str) -> tuple[Word, ...]:
        """The words of this kind that have all of these tags."""
        key = (kind, *tags)
        if key not in self._tagged:
            self._tagged[key] = tuple(word for word in self.words[kind] if word.tags.issuperset(tags))
        return self._tagged[key]

    def they(self, first: str, second: str) -> Word:
        """The pronoun of two people: their own if they share it, else the general one, which comes first."""
        own = {self.people[name].forms["they"] for name in (first, second)}
        return next((word for word in self.words["they"] if own == {word.id}), self.words["they"][0])

    @cached_property
    def parser(self) -> Parser:
        """Finds the patterns that a sentence matches."""
        return Parser(self.groups, self.words)


def complete_sentences(text: str) -> list[str]:
    """The sentences of a text, without an unfinished one at its end. A sentence may quote several others.

    >>> complete_sentences('"Oh! My kite!" said Mia. Tom came. Then')
    ['"Oh! My kite!" said Mia.', 'Tom came.']
    """
    sentences = []
    start = 0
    quote: int | None = None  # where the open quotation began
    for match in _MARKS.finditer(text):
        mark, at = match[0], match.start()
        if quote is not None and at - quote > MAX_SENTENCE:
            quote = None  # its end is missing
        if quote is None and mark in '"“' and not (mark == '"' and at > start and text[at - 1] != " "):
            quote = at
        elif mark in '"”':
            tagged = quote is None or _tag_follows(text, start, quote, at)
            quote = None
            if tagged or text[at - 1] not in _ENDS:
                continue
        elif quote is not None or mark not in _ENDS or (mark in ".!?" and text[at + 1 : at + 2] not in ("", " ", "\n")):
            continue
        if quote is None:
            sentences.append(text[start : at + 1].strip())
            start = at + 1
            while start < len(text) and text[start].isspace():
                start += 1
    if len(text) - start > MAX_SENTENCE:
        sentences.append(text[start:])
    return sentences


def _tag_follows(text: str, start: int, quote: int, end: int) -> bool:
    """Whether the sentence continues after a quotation, as in `"Hello!" said Mia.`

    In English, a small letter follows, or it is cut off there; in Chinese, a quotation at its start is never all of it.
    """
    if text[end] == "”":
        return quote == start
    following = text[end + 1 : end + 3].lstrip(" ")[:1]
    return following.islower() or (following == "" and quote == start)


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
        "": name,
        "full": f"{name} the {species}" if species else name,
        "kid": kid,
        "akid": f"a little {kid}",
        "he": pronoun,
        "him": him,
        "his": his,
        "himself": f"{him}self",
        "He": pronoun.capitalize(),
        "His": his.capitalize(),
        "they": "they",
    }
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
                "": noun,
                "full": full,
                "m": m,
                "one": f"一{m}{full}",
                "that": f"那{m}{noun}",
                "this": f"这{m}{noun}",
            }
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
