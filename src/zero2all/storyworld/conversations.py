"""Conversations about the story world, with answers that can be checked: for a first chat model, and to measure it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

from pydantic import TypeAdapter

from zero2all.base.package_data import read_package_text
from zero2all.storyworld.generate import get_language
from zero2all.storyworld.grammar import Word
from zero2all.storyworld.language import Language, read_toml
from zero2all.storyworld.plots import cast
from zero2all.storyworld.teller import PLOT_PREFERENCE, Teller

T = TypeVar("T")
ConversationKind = Literal["question", "sum", "story", "format", "refusal", "greeting", "turns", "handwritten"]
Message = dict[str, str]

KIND_SHARES: dict[ConversationKind, float] = {
    "question": 0.42, "sum": 0.14, "story": 0.1, "format": 0.14, "refusal": 0.07, "greeting": 0.03, "turns": 0.1,
}  # fmt: skip
ADDENDS = range(2, 6)  # of sums; their words are in the stories
MAX_CONTEXT = 90  # words of a story in a question, or half as many again characters
DIFFERENCE_SHARE = 0.3
HANDWRITTEN = "handwritten"


@dataclass(frozen=True)
class Fact:
    """Questions, answers, and the word that an answer must have."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Phrases:
    """The templates of a language, as its `conversations.toml` has them."""

    facts: dict[str, Fact]
    sums: tuple[tuple[str, str], ...]
    differences: tuple[tuple[str, str], ...]
    result: str
    story_requests: tuple[str, ...]
    json_requests: tuple[str, ...]
    one_word: tuple[str, ...]
    list_requests: tuple[str, ...]
    lists: tuple[tuple[str, str], ...]
    comma: str
    unknown: tuple[str, ...]
    refusals: tuple[str, ...]
    greetings: tuple[tuple[str, str], ...]


@cache
def get_phrases(language: str) -> Phrases:
    """Checked against the types above."""
    return TypeAdapter(Phrases).validate_python(read_toml(language, "conversations"))


@dataclass(frozen=True)
class StoryConversation:
    """A conversation; the last message is the assistant's."""

    kind: ConversationKind
    messages: list[Message]
    expected: str | None = None
    """What the last answer must contain as a word, or if it is JSON, be; None if there is no one right answer."""

    @property
    def prompt(self) -> list[Message]:
        return self.messages[:-1]

    @property
    def reference(self) -> str:
        return self.messages[-1]["content"]

    def is_right(self, answer: str) -> bool | None:
        """Whether an answer is right; None if that cannot be told."""
        if self.expected is None:
            return None
        if self.expected.startswith("{"):
            try:
                found = json.loads(answer)
            except (ValueError, RecursionError):
                return False
            return bool(found == json.loads(self.expected))
        word = re.escape(self.expected.lower())
        # Not inside another Latin word or number; Chinese has no spaces between words.
        apart = rf"(?<![a-z0-9]){word}(?![a-z0-9])" if self.expected.isascii() else word
        return re.search(apart, answer.lower()) is not None


@dataclass(frozen=True)
class StoryFacts:
    """A story and what can be asked about it."""

    text: str
    hero: Word
    place: Word | None
    """Where the hero is first."""
    friend: Word | None
    thing: Word | None
    """What the hero has from the beginning."""
    item: Word | None
    number: Word | None
    """How many of the item the hero has in the end."""


def generate_conversation(language: str, seed: int, number: int) -> StoryConversation:
    """Conversation ``number`` of a seed, in ``en`` or ``zh``: the same in every process."""
    return _Writer(language, f"conversation/{seed}/{language}/{number}").write()


def generate_conversations(language: str, seed: int, count: int, first: int = 0) -> Iterator[StoryConversation]:
    """
    >>> held_out = list(generate_conversations("en", seed=7, count=50, first=1_000_000))
    """
    for number in range(first, first + count):
        yield generate_conversation(language, seed, number)


@cache
def handwritten_conversations(language: str) -> tuple[StoryConversation, ...]:
    """Conversations that were written for this project, without a grammar."""
    text = read_package_text(__package__, f"{HANDWRITTEN}/{language}.txt")
    found = []
    for block in text.strip().split("\n\n"):
        messages: list[Message] = []
        for line in block.splitlines():
            mark, said = line[:2], line[2:].strip()
            if mark in ("> ", "< "):
                messages.append({"role": "user" if mark == "> " else "assistant", "content": said})
        found.append(StoryConversation("handwritten", messages))
    return tuple(found)


class _Writer:
    """Writes one conversation."""

    def __init__(self, language: str, seed: str) -> None:
        self.language: Language = get_language(language)
        self.phrases = get_phrases(language)
        self._random, self._seed = random.Random(seed), seed

    def write(self) -> StoryConversation:
        kinds: dict[ConversationKind, Callable[[], StoryConversation]] = {
            "question": self._question,
            "sum": self._sum,
            "story": self._story,
            "format": self._format,
            "refusal": self._refusal,
            "greeting": self._greeting,
            "turns": self._turns,
        }
        place = self._random.random() * sum(KIND_SHARES.values())
        ends = zip(itertools.accumulate(KIND_SHARES.values()), KIND_SHARES, strict=True)
        return kinds[next(kind for end, kind in ends if place < end)]()

    def choose(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def _question(self) -> StoryConversation:
        facts = self.tell()
        asked, answer, expected = self._fact(facts)
        return _single("question", f"{facts.text}\n{asked}", answer, expected)

    def _fact(self, facts: StoryFacts, other_than: str = "") -> tuple[str, str, str]:
        """A question about a story, its answer, and the word that the answer must have."""
        able = [name for name in self.phrases.facts if name != other_than and _known(facts, name)]
        name = self.choose(able)
        words = self._words(facts)
        fact = self.phrases.facts[name]
        templates = self.choose(fact.questions), self.choose(fact.answers), fact.expected
        question, answer, expected = (template.format(**words) for template in templates)
        return question, answer, expected

    def _words(self, facts: StoryFacts) -> dict[str, str]:
        words = {"a": facts.hero.id}
        if facts.friend is not None:
            words["b"] = facts.friend.id
        if facts.place is not None:
            words |= {"at": facts.place.forms["at"], "place": facts.place.id}
        if facts.thing is not None:
            words |= {"thing": facts.thing.forms["full"], "one": facts.thing.forms.get("a") or facts.thing.forms["one"]}
        if facts.item is not None and facts.number is not None:
            words |= {"item": facts.item.forms[""], "m": facts.item.forms.get("m", ""), "n": facts.number.forms[""]}
        return words

    def _sum_turn(self) -> tuple[str, str, str]:
        n, m = self.choose(ADDENDS), self.choose(ADDENDS)
        k, kinds = n + m, self.phrases.sums
        if self._random.random() < DIFFERENCE_SHARE:
            n, k, kinds = k, n, self.phrases.differences
        forms = {name: self.language.numbers[number].forms for name, number in (("n", n), ("m", m), ("k", k))}
        words = {name: form.get("math", form[""]) for name, form in forms.items()}
        words |= {f"{name.upper()}": words[name].capitalize() for name in ("n", "m", "k")}
        question, answer = self.choose(kinds)
        return question.format(**words), answer.format(**words), self.phrases.result.format(**words)

    def _sum(self) -> StoryConversation:
        return _single("sum", *self._sum_turn())

    def _story(self) -> StoryConversation:
        facts = self.tell()
        return _single(
            "story", self.choose(self.phrases.story_requests).format(a=facts.hero.id), facts.text, facts.hero.id
        )

    def _format(self) -> StoryConversation:
        kind = self.choose(("json", "word", "list"))
        if kind == "list":
            count = self.choose((2, 3))
            group, name = self.choose(self.phrases.lists)
            items = [word.forms[""] for word in self.language.tagged("item", group)]
            self._random.shuffle(items)
            asked = self.choose(self.phrases.list_requests).format(n=self.language.numbers[count].forms[""], name=name)
            return _single("format", asked, self.phrases.comma.join(items[:count]), None)
        facts = self.tell(lambda one: one.place is not None)
        words = self._words(facts)
        if kind == "json":
            value = json.dumps({"name": words["a"], "place": words["place"]}, ensure_ascii=False)
            return _single("format", f"{facts.text}\n{self.choose(self.phrases.json_requests)}", value, value)
        name = self.choose(("who", "where"))
        fact = self.phrases.facts[name]
        asked = self.choose(self.phrases.one_word).format(question=self.choose(fact.questions).format(**words))
        word = fact.expected.format(**words)
        return _single("format", f"{facts.text}\n{asked}", word, word)

    def _refusal(self) -> StoryConversation:
        return _single("refusal", self.choose(self.phrases.unknown), self.choose(self.phrases.refusals), None)

    def _greeting(self) -> StoryConversation:
        question, answer = self.choose(self.phrases.greetings)
        return _single("greeting", question, answer, None)

    def _turns(self) -> StoryConversation:
        """Two turns: two questions about one story, a story and a question about it, or a sum after a greeting."""
        way = self.choose(("two questions", "own story", "greeting"))
        if way == "greeting":
            first = self._greeting()
            asked, answer, expected = self._sum_turn()
            return _more(first, asked, answer, expected)
        facts = self.tell()
        if way == "own story":
            request = self.choose(self.phrases.story_requests).format(a=facts.hero.id)
            first = _single("turns", request, facts.text, None)
        else:
            asked, answer, _ = self._fact(facts, other_than="many")
            first = _single("turns", f"{facts.text}\n{asked}", answer, None)
        return _more(first, *self._fact(facts))

    def tell(self, suits: Callable[[StoryFacts], bool] = lambda facts: True) -> StoryFacts:
        """A story that is short enough, and what is known of it."""
        limit = MAX_CONTEXT if self.language.separator else MAX_CONTEXT * 3 // 2
        for attempt in itertools.count():
            teller = _RecordingTeller(self.language, f"{self._seed}/{attempt}")
            cast(teller)
            teller.prefer(self.language.plots, PLOT_PREFERENCE)(teller)
            facts = teller.facts()
            if self.language.length[0] <= self.language.measure(facts.text) <= limit and suits(facts):
                return facts
        raise AssertionError


class _RecordingTeller(Teller):
    """Remembers where the hero was first."""

    first_place: str | None = None

    def tell(self, call: str) -> None:
        super().tell(call)
        hero = self.world.people.get(self.words["a"].id)
        if self.first_place is None and hero is not None:
            self.first_place = hero.place

    def facts(self) -> StoryFacts:
        hero, friend = self.words["a"], self.words["b"]
        places = {word.id: word for word in self.language.words["place"]}
        owned = self.words["o"] if self.world.things.get(self.words["o"].id) is not None else None
        counts = {item: count.number for (person, item), count in self.world.counts.items() if person == hero.id}
        # About one item only, so that there is one answer.
        item = next(iter(counts)) if len(counts) == 1 else None
        numbers = self.language.numbers
        items = {word.id: word for word in self.language.words["item"]}
        known = item in items and counts[item] in numbers
        return StoryFacts(
            text=self.text(),
            hero=hero,
            place=places.get(self.first_place or ""),
            friend=friend if friend.id in self.world.people else None,
            thing=owned,
            item=items[item] if item is not None and known else None,
            number=numbers[counts[item]] if item is not None and known else None,
        )


def _known(facts: StoryFacts, name: str) -> bool:
    needed = {"where": facts.place, "friend": facts.friend, "thing": facts.thing, "many": facts.number}
    return name not in needed or needed[name] is not None


def _single(kind: ConversationKind, asked: str, answer: str, expected: str | None) -> StoryConversation:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return StoryConversation(kind, messages, expected)


def _more(first: StoryConversation, asked: str, answer: str, expected: str | None) -> StoryConversation:
    following = _single("turns", asked, answer, expected)
    return StoryConversation("turns", [*first.messages, *following.messages], expected)
