"""The questions of benchmarks, as typed records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
