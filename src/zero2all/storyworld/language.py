"""What the engine knows about a language: its words, patterns and plots, and where its sentences end."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from zero2all.storyworld.grammar import Group, Parser, Word, read_groups

if TYPE_CHECKING:
    from zero2all.storyworld.teller import Teller

PACKAGE = "zero2all.storyworld"
MAX_SENTENCE = 300  # characters; the longest sentence of the grammar is about half as long
_ENDS = ".!?。！？"
_MARKS = re.compile(r'[.!?。！？"“”]')


def read_toml(language: str, name: str) -> dict[str, Any]:
    """A data file of a language: its words, or the phrases of its conversations."""
    return tomllib.loads((files(PACKAGE) / language / f"{name}.toml").read_text(encoding="utf-8"))


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
