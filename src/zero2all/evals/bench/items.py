"""The questions of benchmarks as typed records, and their prompts.

Prompts have fixed formats, lm-eval's where it has the task, so that scores can be compared: the description of
the task, the examples with their answers and the question, separated by empty lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zero2all.base.package_data import read_package_table

Language = Literal["en", "zh"]
Form = Literal["cloze", "letter", "cot"]
"""How a multiple-choice question is asked. ``cloze``: the text of each option is scored as the answer, options are not
shown. ``letter``: the options are shown, and their labels are scored. ``cot``: the same after a chain of thought."""
LabelStyle = Literal["letters", "chinese", "roman", "none"]
LABELS: dict[LabelStyle, tuple[str, ...]] = {
    "letters": tuple("ABCDEFGHIJ"),
    "chinese": tuple("一二三四五六七八九十"),
    "roman": ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X"),
    "none": (),
}


@dataclass(frozen=True)
class ChoiceItem:
    """A multiple-choice question."""

    id: str
    question: str
    options: tuple[str, ...]
    answers: tuple[int, ...]
    """The right options; usually one."""
    subject: str = ""
    passage: str = ""
    labels: LabelStyle = "letters"

    @property
    def chance(self) -> float:
        """Probability that as many options as are right, chosen at random, are the right ones."""
        return 1 / math.comb(len(self.options), len(self.answers))

    @property
    def shown_labels(self) -> tuple[str, ...]:
        """One for each option; empty if they have none."""
        return LABELS[self.labels][: len(self.options)]


@dataclass(frozen=True)
class ClozeItem:
    """A text without its last word."""

    id: str
    context: str
    continuation: str
    """With the space before it."""
    subject: str = ""


@dataclass(frozen=True)
class AnswerItem:
    """A question whose answer is generated."""

    id: str
    question: str
    answer: str
    """What the generated answer has to be."""
    solution: str
    """The text of an example answer; with the steps to it, if it has any."""
    kind: Literal["first-line", "number"]
    """``first-line``: the first line of the text is the answer. ``number``: the number after ``####``."""
    subject: str = ""


@dataclass(frozen=True)
class CodeItem:
    """A function to complete, and its tests."""

    id: str
    prompt: str
    solution: str
    test: str
    entry_point: str
    subject: str = ""


Item = ChoiceItem | ClozeItem | AnswerItem | CodeItem


SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Wording:
    """The fixed words in a language."""

    question: str
    answer: str
    delimiter: str
    """Between the prompt and the text of an option."""
    reasoning: str
    conclusion: str
    possible_answers: str


_WORDS = read_package_table(__package__, "wording.toml")
WORDING: dict[Language, Wording] = {"en": Wording(**_WORDS["en"]), "zh": Wording(**_WORDS["zh"])}


@dataclass(frozen=True)
class ChoiceQuery:
    """What is scored for a multiple-choice question."""

    context: str
    continuations: tuple[str, ...]
    """One for each option."""
    texts: tuple[str, ...]
    """The continuations without the space before them."""


def choice_query(
    item: ChoiceItem, form: Form, language: Language, description: str, examples: Sequence[ChoiceItem]
) -> ChoiceQuery:
    """The prompt of a multiple-choice question, and the answers to score."""
    texts = _answer_texts(item, form)
    # lm-eval has a space before letters in Chinese too.
    delimiter = WORDING[language].delimiter if texts is item.options else " "
    shots = [_question_text(example, form, language) + delimiter + _right_answer(example, form) for example in examples]
    context = description + SEPARATOR.join([*shots, _question_text(item, form, language)])
    return ChoiceQuery(context, tuple(delimiter + text for text in texts), texts)


def reasoning_prompt(context: str, language: Language) -> str:
    """The prompt of a letter question, up to the chain of thought."""
    wording = WORDING[language]
    return context + wording.delimiter + wording.reasoning


def concluded(prompt: str, reasoning: str, language: Language) -> str:
    """The prompt with the chain of thought, up to the letter."""
    return f"{prompt}{reasoning.rstrip()}\n{WORDING[language].conclusion}"


def answer_prompt(item: AnswerItem, language: Language, examples: Sequence[Item]) -> str:
    """The prompt of a question whose answer is generated."""
    shots = [
        _asked(example.question, language) + " " + example.solution
        for example in examples
        if isinstance(example, AnswerItem)
    ]
    return SEPARATOR.join([*shots, _asked(item.question, language)])


def _asked(question: str, language: Language) -> str:
    wording = WORDING[language]
    return f"{wording.question}{question}\n{wording.answer}"


def _question_text(item: ChoiceItem, form: Form, language: Language) -> str:
    passage = f"{item.passage.strip()}\n" if item.passage.strip() else ""
    if form == "cloze":
        return passage + _asked(item.question, language)
    stem = f"{item.question.strip()}\n" if item.question.strip() else ""
    labels = [f"{label}. " for label in item.shown_labels] or ["- "] * len(item.options)
    lines = "".join(f"{label}{option}\n" for label, option in zip(labels, item.options, strict=True))
    return passage + stem + lines + WORDING[language].answer


def _answer_texts(item: ChoiceItem, form: Form) -> tuple[str, ...]:
    return item.options if form == "cloze" else item.shown_labels or item.options


def _right_answer(item: ChoiceItem, form: Form) -> str:
    texts = _answer_texts(item, form)
    return texts[item.answers[0]] if texts is item.options else "".join(texts[answer] for answer in item.answers)
