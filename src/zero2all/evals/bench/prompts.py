"""Prompts: fixed formats, those of lm-eval where it has the task, so that scores can be compared.

A prompt is the description of the task, the examples with their answers and the question, separated by empty lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero2all.evals.bench.items import AnswerItem, ChoiceItem, Form, Item, Language

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


WORDING: dict[Language, Wording] = {
    "en": Wording(
        question="Question: ",
        answer="Answer:",
        delimiter=" ",
        reasoning="Let's think step by step.",
        conclusion="Therefore, the answer is",
        possible_answers="Possible answers:",
    ),
    "zh": Wording(
        question="问题：",
        answer="答案：",
        delimiter="",
        reasoning="让我们一步一步地思考。",
        conclusion="所以答案是",
        possible_answers="可能的答案：",
    ),
}


@dataclass(frozen=True)
class ChoiceQuery:
    """What is scored for a multiple-choice question."""

    context: str
    continuations: tuple[str, ...]
    """One for each option."""
    texts: tuple[str, ...]
    """Those without the space before them."""


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
