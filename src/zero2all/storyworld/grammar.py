"""Sentence patterns: read from text files, filled in by the generator, and found in a sentence by the checker.

A pattern file holds groups. A group has a name, the roles that a plot passes, and the events that its lines mean; each
line is one way to say it:

    @give(a, b, o): give a b o
    {a} gave {b} the {o}.
    "Take it," said {a}, and gave the {o} to {b}.

`{o.a}` is a form of the word in role `o` ("a red kite"). `{A}` is a subject: the name, or a pronoun if the sentence
before was about the same person. `{they}` stands for the people in roles `a` and `b`. A role that a plot does not pass,
such as `{weather}` or `{weather2}`, is any word of that kind; an event names it in braces too (`is a {trait}`), and an
event that ends in `?` is left out of lines without its roles. If a line has several sentences, an event belongs to the
first that has all of its roles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zero2all.storyworld.world import EVENTS, StoryEvent

KINDS = {
    "a": "person", "b": "person", "c": "person", "o": "thing", "u": "thing", "x": "place", "y": "place",
    "f": "item", "g": "item", "n": "number", "m": "number", "k": "number",
}  # fmt: skip
PERSON_ROLES = ("a", "b", "c")
THING_ROLES = ("o", "u")
PRONOUN_FORMS = ("he", "him", "his", "He", "His")
_SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_JOINT = re.compile(r"\{[abc]\}( and |和)\{[abc]\}")
_HEADER = re.compile(r"@(\w+)\(([^)]*)\):\s*(.*)")


class Word(NamedTuple):
    """A word or phrase that fills a slot. `id` is unique in its kind; `forms[""]` is the plain form."""

    id: str
    forms: Mapping[str, str]
    tags: frozenset[str] = frozenset()


class PatternSlot(NamedTuple):
    """A gap in a pattern. `pronoun` is the form that may stand for the name, if any."""

    role: str
    form: str
    pronoun: str = ""


@dataclass(frozen=True)
class Pattern:
    """One sentence with slots, and the events it means."""

    parts: tuple[str | PatternSlot, ...]
    events: tuple[StoryEvent, ...]  # their arguments are roles, or words after "="
    people: tuple[str, ...]  # roles, in the order of mention; `they` are a and b
    things: tuple[str, ...]
    plural: bool  # has `they`
    joint: bool  # has `they`, or two people joined by "and"
    unnamed: str | None  # the role of a person who occurs only as a pronoun

    def meaning(self, words: Mapping[str, str]) -> list[StoryEvent]:
        """The events, with the ids of the words in their roles."""
        return [
            StoryEvent(name, tuple(arg[1:] if arg[0] == "=" else words[arg] for arg in args))
            for name, args in self.events
        ]

    def __str__(self) -> str:
        return "".join(part if isinstance(part, str) else f"{{{part.role}.{part.form}}}" for part in self.parts)


@dataclass(frozen=True)
class Group:
    """Lines that mean the same; each is a sequence of sentences."""

    name: str
    roles: tuple[str, ...]
    lines: tuple[tuple[Pattern, ...], ...]


def role_kind(role: str) -> str:
    """The kind of words in a role: `doing2` holds a word of kind `doing`."""
    return KINDS.get(role) or role.rstrip("23456789")


def read_groups(text: str, split: Callable[[str], list[str]]) -> dict[str, Group]:
    """The groups of a pattern file by name."""
    groups: dict[str, Group] = {}
    header: tuple[str, tuple[str, ...], str] | None = None
    lines: list[tuple[Pattern, ...]] = []
    for row in [*text.splitlines(), "@end():"]:
        if not row or row.startswith("#"):
            continue
        if not row.startswith("@"):
            assert header, f"a line before the first group: {row}"
            lines.append(_read_line(row, header[2], split))
            continue
        if header:
            assert header[0] not in groups, f"two groups are named {header[0]}"
            groups[header[0]] = Group(header[0], header[1], tuple(lines))
        match = _HEADER.fullmatch(row)
        assert match, f"not a header: {row}"
        header, lines = (match[1], tuple(filter(None, match[2].replace(",", " ").split())), match[3]), []
    return groups


def _read_line(line: str, events: str, split: Callable[[str], list[str]]) -> tuple[Pattern, ...]:
    sentences = split(line + "\n")
    assert "".join(sentences).replace(" ", "") == line.replace(" ", ""), f"not whole sentences: {line}"
    slots = [_slots(sentence) for sentence in sentences]
    meanings: list[list[StoryEvent]] = [[] for _ in sentences]
    for event in filter(None, events.split(";")):
        name, *words = event.replace("?", "").split()
        assert name in EVENTS, f"no event {name}"
        args = tuple(word if word in KINDS else word[1:-1] if word[0] == "{" else f"={word}" for word in words)
        needed = {arg for arg in args if arg[0] != "="}
        home = [i for i, one in enumerate(slots) if needed <= _roles(one)]
        assert home or "?" in event, f"no sentence of {line!r} has the roles of {event}"
        if home:
            meanings[home[0]].append(StoryEvent(name, args))
    return tuple(_pattern(*one) for one in zip(sentences, slots, meanings, strict=True))


def _slots(sentence: str) -> list[str | PatternSlot]:
    parts: list[str | PatternSlot] = []
    end = 0
    for match in _SLOT.finditer(sentence):
        if match.start() > end:
            parts.append(sentence[end : match.start()])
        role, form = match[1], match[2] or ""
        initial = match.start() == 0
        if role in ("They", "they"):
            parts.append(PatternSlot("they", "Cap" if role == "They" else ""))
        elif role.isupper():
            parts.append(PatternSlot(role.lower(), "", "He" if initial else "he"))
        else:
            parts.append(PatternSlot(role, form))
        end = match.end()
    return [*parts, sentence[end:]] if end < len(sentence) else parts


def _roles(parts: list[str | PatternSlot]) -> set[str]:
    roles = {part.role for part in parts if isinstance(part, PatternSlot)}
    return roles | {"a", "b"} if "they" in roles else roles


def _pattern(sentence: str, parts: list[str | PatternSlot], events: list[StoryEvent]) -> Pattern:
    slots = [part for part in parts if isinstance(part, PatternSlot)]
    mentions = [role for slot in slots for role in (("a", "b") if slot.role == "they" else (slot.role,))]
    people = tuple(dict.fromkeys(role for role in mentions if role in PERSON_ROLES))
    plural = any(slot.role == "they" for slot in slots)
    named = {slot.role for slot in slots if slot.form not in PRONOUN_FORMS} | ({"a", "b"} if plural else set())
    unnamed = [role for role in people if role not in named]
    assert len(unnamed) <= 1, f"two people without a name in {sentence!r}"
    things = tuple(dict.fromkeys(role for role in mentions if role in THING_ROLES))
    joint = plural or _JOINT.search(sentence) is not None
    return Pattern(tuple(parts), tuple(events), people, things, plural, joint, unnamed[0] if unnamed else None)


class Parse(NamedTuple):
    """A way to read a sentence: for each role the ids of the words that its slots allow."""

    pattern: Pattern
    words: Mapping[str, frozenset[str]]


@dataclass
class _Node:
    """A node of the trie of patterns, or of the trie of the words that fill a slot."""

    characters: dict[str, _Node] = field(default_factory=dict)
    slots: list[tuple[str, _Node, _Node]] = field(default_factory=list)  # role, words, what follows
    patterns: list[Pattern] = field(default_factory=list)
    ids: frozenset[str] = frozenset()

    def extend(self, text: str) -> _Node:
        node = self
        for character in text:
            node = node.characters.setdefault(character, _Node())
        return node


class Parser:
    """Finds the patterns that a sentence matches, with a trie over all of them.

    Every step consumes characters and no pattern repeats, so the time is bounded by the number of patterns.
    """

    def __init__(self, groups: Mapping[str, Group], words: Mapping[str, tuple[Word, ...]]) -> None:
        self._words = words
        self._lexicons: dict[PatternSlot, _Node] = {}
        self._root = _Node()
        for group in groups.values():
            for line in group.lines:
                for pattern in line:
                    self._add(pattern)

    def parse(self, sentence: str) -> list[Parse]:
        """All readings of the sentence; none if it is not in the language."""
        return list(self._match(self._root, sentence, 0, {}))

    def _add(self, pattern: Pattern) -> None:
        node = self._root
        for part in pattern.parts:
            if isinstance(part, str):
                node = node.extend(part)
                continue
            lexicon = self._lexicon(part)
            known = [after for role, words, after in node.slots if role == part.role and words is lexicon]
            if not known:
                known = [_Node()]
                node.slots.append((part.role, lexicon, known[0]))
            node = known[0]
        if all((pattern.parts, pattern.events) != (other.parts, other.events) for other in node.patterns):
            node.patterns.append(pattern)

    def _lexicon(self, slot: PatternSlot) -> _Node:
        key = slot._replace(role=role_kind(slot.role))
        if key not in self._lexicons:
            root = self._lexicons[key] = _Node()
            for word in self._words[key.role]:
                for form in filter(None, (slot.form or "_", slot.pronoun)):
                    if text := word.forms.get("" if form == "_" else form):
                        node = root.extend(text)
                        node.ids |= {word.id}
        return self._lexicons[key]

    def _match(self, node: _Node, text: str, start: int, words: Mapping[str, frozenset[str]]) -> Iterator[Parse]:
        while True:
            for role, lexicon, after in node.slots:
                for end, ids in _prefixes(lexicon, text, start):
                    if both := ids & words.get(role, ids):
                        yield from self._match(after, text, end, {**words, role: both})
            if start == len(text):
                yield from (Parse(pattern, words) for pattern in node.patterns if _distinct(words))
                return
            following = node.characters.get(text[start])
            if following is None:
                return
            node, start = following, start + 1


def _prefixes(node: _Node, text: str, start: int) -> Iterator[tuple[int, frozenset[str]]]:
    for end in range(start, len(text)):
        following = node.characters.get(text[end])
        if following is None:
            return
        node = following
        if node.ids:
            yield end + 1, node.ids


def _distinct(words: Mapping[str, frozenset[str]]) -> bool:
    """Two roles of a kind hold different words: nobody gives a thing to themselves. Numbers may be equal."""
    seen = set()
    for role, ids in words.items():
        kind = role_kind(role)
        if kind != "number" and len(ids) == 1:
            if (kind, ids) in seen:
                return False
            seen.add((kind, ids))
    return True
