"""Measures a text that a model has written: do its sentences parse, do they agree, are its sums right?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zero2all.storyworld.generate import get_language
from zero2all.storyworld.grammar import PERSON_ROLES, THING_ROLES, Parse
from zero2all.storyworld.language import MAX_SENTENCE, Language, complete_sentences
from zero2all.storyworld.world import Discourse, Problem, ProblemKind, World

MAX_STORY = 5000  # characters; no story is a quarter as long, and a check must end whatever a model writes
MIN_PARSED = 0.5  # of the sentences: the consistency of a text that is hardly understood is not known


@dataclass(frozen=True)
class StoryProblem:
    """A contradiction, and the sentence in which it occurs."""

    sentence: str
    kind: ProblemKind
    message: str


@dataclass(frozen=True)
class StoryCheck:
    """What is right and wrong in one story. An unfinished sentence at its end is not counted."""

    sentences: int
    unparsed: tuple[str, ...]
    problems: tuple[StoryProblem, ...]
    sums: int
    right_sums: int

    @property
    def parsed(self) -> int:
        """The number of sentences that are in the language of the stories."""
        return self.sentences - len(self.unparsed)

    @property
    def consistent(self) -> bool:
        """No sentence contradicts another, and at least half of them, and at least one, can be understood."""
        return not self.problems and self.parsed > 0 and self.parsed >= MIN_PARSED * self.sentences


@dataclass(frozen=True)
class StoryQuality:
    """The quality of many stories. A share is None if there is nothing to count."""

    stories: int
    sentences: int
    parsed_share: float | None
    consistent_share: float | None
    sums: int
    right_sum_share: float | None


def check_story(text: str, language: str) -> StoryCheck:
    """Check a story in `en` or `zh`: any text, also broken, cut off or in another language.

    Only the first 5,000 characters are read.
    """
    checker = _Checker(get_language(language))
    for sentence in complete_sentences(text[:MAX_STORY]):
        checker.read(sentence)
    world = checker.world
    return StoryCheck(checker.sentences, tuple(checker.unparsed), tuple(checker.problems), world.sums, world.right_sums)


def summarize_checks(checks: Iterable[StoryCheck]) -> StoryQuality:
    """The shares of sentences that parse, of stories that are consistent and of sums that are right."""
    checks = list(checks)
    sentences = sum(check.sentences for check in checks)
    sums = sum(check.sums for check in checks)
    return StoryQuality(
        stories=len(checks),
        sentences=sentences,
        parsed_share=_share(sum(check.parsed for check in checks), sentences),
        consistent_share=_share(sum(check.consistent for check in checks), len(checks)),
        sums=sums,
        right_sum_share=_share(sum(check.right_sums for check in checks), sums),
    )


def _share(part: int, total: int) -> float | None:
    return part / total if total else None


class _Reading(NamedTuple):
    """The world after a sentence, the people in it, and the contradictions."""

    world: World
    people: tuple[str, ...]
    joint: bool
    problems: list[Problem]


class _Checker:
    """Reads a story sentence by sentence and keeps the world that it describes."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.world = World()
        self.discourse = Discourse()
        self.sentences = 0
        self.unparsed: list[str] = []
        self.problems: list[StoryProblem] = []

    def read(self, sentence: str) -> None:
        """Apply what the sentence says. Of several readings, the first without a contradiction counts."""
        self.sentences += 1
        parses = self.language.parser.parse(sentence) if len(sentence) <= MAX_SENTENCE else []
        if not parses:
            self.unparsed.append(sentence)
            self._skip(sentence)
            return
        readings = [self._apply(parse, copy.deepcopy(self.world)) for parse in parses[1:]]
        readings.append(self._apply(parses[0], self.world))
        best = min(readings, key=lambda reading: len(reading.problems))
        self.world = best.world
        self.discourse.mention(best.people, joint=best.joint)
        self.problems += [StoryProblem(sentence, problem.kind, problem.message) for problem in best.problems]

    def _apply(self, parse: Parse, world: World) -> _Reading:
        pattern = parse.pattern
        words, problems = self._resolve(parse)
        if problems:
            return _Reading(world, (), pattern.joint, problems)
        people = tuple(words[role] for role in pattern.people)
        things = [words[role] for role in pattern.things]
        return _Reading(world, people, pattern.joint, world.apply(pattern.meaning(words), people, things))

    def _resolve(self, parse: Parse) -> tuple[Mapping[str, str], list[Problem]]:
        """The word in each role: a pronoun means a person of the sentences before, a noun the thing of that name."""
        words: dict[str, str] = {}
        problems: list[Problem] = []
        if parse.pattern.plural:
            if (pair := self.discourse.pair) is None:
                problems.append(Problem(ProblemKind.NAME, "nobody is meant by the plural"))
                return words, problems
            if self.language.they(*pair).id not in parse.words["they"]:
                problems.append(Problem(ProblemKind.NAME, f"the plural does not mean {pair[0]} and {pair[1]}"))
            words["a"], words["b"] = pair
        for role, ids in parse.words.items():
            if len(ids) == 1 or role not in (*PERSON_ROLES, *THING_ROLES):
                words[role] = min(ids)
            elif role in PERSON_ROLES:
                if self.discourse.topic not in ids:
                    problems.append(Problem(ProblemKind.NAME, "nobody is meant by the pronoun"))
                words[role] = self.discourse.topic or ""
            else:
                words[role] = min(ids & self.world.things.keys() or ids)
        return words, problems

    def _skip(self, sentence: str) -> None:
        """What a sentence that does not parse mentions is unknown from now on; a new name in it is a mistake."""
        names = list(dict.fromkeys(self.language.names.findall(sentence)))
        for name in names:
            if name not in self.world.people:
                message = f"{name} was not introduced"
                self.problems.append(StoryProblem(sentence, ProblemKind.NAME, message))
        things = [thing.id for thing in self.language.words["thing"] if thing.forms[""] in sentence]
        self.world.forget(names or self.discourse.people, things)
