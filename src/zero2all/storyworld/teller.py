"""Tells one story: draws its cast, applies the events of a plot to a world, and writes a sentence for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from zero2all.storyworld.grammar import Pattern, Word, role_kind
from zero2all.storyworld.language import Language
from zero2all.storyworld.world import Discourse, World

T = TypeVar("T")
EVEN = (
    "person",
    "place",
)  # words of these kinds are equally likely: a story must be read to know who is meant, and where
KEPT = ("kin", "season")  # a word of these kinds is chosen once in a story
ADDENDS = (2, 3)  # sums that a small model can learn from a few thousand stories
SUBTRAHEND = 2  # of all differences: they are harder than sums, as their numbers are sentences apart
OPTIONAL_SHARE = 0.3  # of the optional sentences are told: more of them would make most stories too long
PREFERENCE = 4.0  # 1 would make all options equally likely; with 4, the first of 16 is chosen in half of the cases
PLOT_PREFERENCE = 2.0  # the first of 20 plots is drawn in a fifth of the cases
PRONOUN_SHARE = 0.75  # of the places where a pronoun may stand for a name


class Teller:
    """A story in the making. `words` maps the roles of the plot to words; a plot adds to it with `let`."""

    def __init__(self, language: Language, seed: str) -> None:
        self.language = language
        self.words: dict[str, Word] = {}
        self.world = World()
        self.sentences: list[str] = []
        self._random = random.Random(seed)
        self._discourse = Discourse()
        self._used: set[int] = set()
        self._pronouns = 0

    def choose(self, options: Sequence[T]) -> T:
        """One of the options. `Random.random` gives the same numbers in all versions of Python; `choice` need not."""
        return options[int(self._random.random() * len(options))]

    def prefer(self, options: Sequence[T], preference: float = PREFERENCE) -> T:
        """One of the options, the earlier the likelier: a language has frequent words and rare ones."""
        return options[int(self._random.random() ** preference * len(options))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def number(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def word(self, kind: str, *tags: str, other_than: Sequence[Word] = ()) -> Word:
        """A word of this kind that has these tags."""
        taken = {word.id for word in other_than}
        choose = self.choose if kind in EVEN else self.prefer
        while (word := choose(self.language.tagged(kind, *tags))).id in taken:
            pass
        return word

    def let(self, **words: Word | int) -> None:
        """Put words, or numbers, into roles."""
        for role, word in words.items():
            self.words[role] = self.language.numbers[word] if isinstance(word, int) else word

    def let_sum(self) -> None:
        """Put numbers into roles so that n + m = k."""
        n, m = self.choose(ADDENDS), self.choose(ADDENDS)
        self.let(n=n, m=m, k=n + m)

    def let_difference(self) -> None:
        """Put numbers into roles so that n - m = k."""
        m, k = SUBTRAHEND, self.choose(ADDENDS)
        self.let(n=m + k, m=m, k=k)

    def let_halves(self) -> None:
        """Put numbers into roles so that n is twice k."""
        k = self.choose(ADDENDS)
        self.let(n=2 * k, k=k)

    def tell(self, call: str) -> None:
        """Add the sentences of a group of patterns: `give b a o` passes the words in b, a and o to its roles."""
        name, *actual = call.split()
        group = self.language.groups[name]
        words = {role: self.words[one] for role, one in zip(group.roles, actual, strict=True)}
        lines = [line for line in group.lines if self._fits(line[0], words)]
        fresh = [line for line in lines if id(line) not in self._used]
        line = self.prefer(fresh or lines)
        self._used.add(id(line))
        for pattern in line:
            self._fill(pattern, words)
            self._say(pattern, words)

    def maybe(self, call: str, probability: float = 0.5) -> None:
        """An optional sentence: told in `OPTIONAL_SHARE` of the cases that this probability allows."""
        if self.chance(OPTIONAL_SHARE * probability):
            self.tell(call)

    def text(self) -> str:
        """The story."""
        return self.language.separator.join(self.sentences)

    def _fits(self, pattern: Pattern, words: dict[str, Word]) -> bool:
        """Whether the pronouns of the pattern would mean the people in its roles."""
        if pattern.plural:
            pair = self._discourse.pair
            return pair is not None and set(pair) == {words["a"].id, words["b"].id}
        return pattern.unnamed is None or words[pattern.unnamed].id == self._discourse.topic

    def _fill(self, pattern: Pattern, words: dict[str, Word]) -> None:
        """Choose words for the roles that the plot did not pass."""
        for part in pattern.parts:
            if isinstance(part, str) or part.role in words:
                continue
            kind = role_kind(part.role)
            if kind == "they":
                words["they"] = self.language.they(words["a"].id, words["b"].id)
            elif kind in KEPT:
                words[part.role] = self.words.setdefault(kind, self.word(kind))
            else:
                taken = [word for role, word in words.items() if role_kind(role) == kind]
                words[part.role] = self.word(kind, other_than=taken)

    def _say(self, pattern: Pattern, words: dict[str, Word]) -> None:
        ids = {role: word.id for role, word in words.items()}
        people = tuple(ids[role] for role in pattern.people)
        problems = self.world.apply(pattern.meaning(ids), people, [ids[role] for role in pattern.things])
        assert not problems, f"{self.text()} [{pattern}] {problems}"
        parts = []
        pronouns = 0
        for part in pattern.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            form = part.form
            if part.pronoun and self._may_be_pronoun(words[part.role]):
                form, pronouns = part.pronoun, self._pronouns + 1
            parts.append(words[part.role].forms[form])
        self._pronouns = pronouns
        self.sentences.append("".join(parts))
        self._discourse.mention(people, joint=pattern.joint)

    def _may_be_pronoun(self, person: Word) -> bool:
        """Not after two pronouns, and not if the sentence before has another person of the same pronoun."""
        if person.id != self._discourse.topic or self._pronouns >= 2:
            return False
        people = self.language.people
        rivals = [one for one in self._discourse.people if people[one].forms["he"] == person.forms["he"]]
        return len(rivals) == 1 and self.chance(PRONOUN_SHARE)
