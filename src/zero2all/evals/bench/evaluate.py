"""Ask a model the items of a benchmark."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from zero2all.evals.bench.items import (
    AnswerItem,
    ChoiceItem,
    ChoiceQuery,
    ClozeItem,
    CodeItem,
    Form,
    answer_prompt,
    choice_query,
    concluded,
    reasoning_prompt,
)
from zero2all.evals.bench.tasks import Task
from zero2all.evals.log_likelihood import Score, encode_pair, score
from zero2all.evals.target import EvalTarget
from zero2all.generation import SamplingParams, generate_batch
from zero2all.sandbox import Sandbox

LINE_TOKENS, REASONING_TOKENS, CODE_TOKENS = 64, 256, 512
ANSWER_STOP = ("Question:", "问题：")
CODE_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # the function has ended
NUMBER = re.compile(r"#### (-?[0-9.,]+)")


class Scorer(Protocol):
    """A model, or a stand-in for one in tests."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score | None]:
        """Score each continuation after its context; None if the continuation is longer than the model's context."""
        ...

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: tuple[str, ...]) -> list[str]:
        """The greedy continuation of each prompt."""
        ...


class ModelScorer:
    """Scores and generates with the model of a target."""

    def __init__(self, target: EvalTarget) -> None:
        self.target = target

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score | None]:
        limit = self.target.model.config.max_position_embeddings
        requests = [encode_pair(self.target.tokenizer, context, continuation) for context, continuation in pairs]
        fitting = [request for request in requests if len(request.continuation) <= limit]
        scores = iter(score(self.target.model, fitting))
        return [next(scores) if len(request.continuation) <= limit else None for request in requests]

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: tuple[str, ...]) -> list[str]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop)
        completions = generate_batch(self.target.model, self.target.tokenizer, prompts, params)
        return [completion.text for completion in completions]


@dataclass(frozen=True)
class ItemResult:
    """How a model did on an item."""

    id: str
    is_right: bool
    chance: float
    """Probability of a right answer by chance."""
    is_right_per_byte: bool | None = None
    """Where the texts of options are scored: with the log-likelihood of each divided by its bytes."""
    nats: float = 0.0
    """-log P(right answer); of several right options the sum."""
    bytes: int = 0
    """Bytes of the right answer; 0 if it was not scored, since it is longer than the model's context."""
    is_unsupported: bool = False
    """Whether code could not be tested, since it passes more than plain data; it does not count as right."""


def evaluate_task(
    scorer: Scorer, task: Task, form: Form | None = None, shots: int = 0, sandbox: Sandbox | None = None
) -> list[ItemResult]:
    """The result of each item, in their order. ``form`` is for multiple-choice questions; default: the task's."""
    choices = [item for item in task.items if isinstance(item, ChoiceItem)]
    clozes = [item for item in task.items if isinstance(item, ClozeItem)]
    answers = [item for item in task.items if isinstance(item, AnswerItem)]
    codes = [item for item in task.items if isinstance(item, CodeItem)]
    results: list[ItemResult] = []
    if choices:
        results += _ask_choices(scorer, task, choices, form or task.form or "letter", shots)
    if clozes:
        results += _ask_clozes(scorer, clozes)
    if answers:
        results += _ask_answers(scorer, task, answers, shots)
    if codes:
        assert sandbox is not None
        results += _ask_codes(scorer, codes, sandbox)
    by_id = {result.id: result for result in results}
    return [by_id[item.id] for item in task.items]


def choice_queries(task: Task, items: Sequence[ChoiceItem], form: Form, shots: int) -> list[ChoiceQuery]:
    """The prompts of multiple-choice questions. Examples have the labels of the question."""
    queries = []
    for item in items:
        examples = [
            ChoiceItem(one.id, one.question, one.options, one.answers, one.subject, one.passage, item.labels)
            for one in task.examples_of(item.subject, shots)
            if isinstance(one, ChoiceItem)
        ]
        queries.append(choice_query(item, form, task.language, task.description(item.subject, form), examples))
    return queries


def _ask_choices(scorer: Scorer, task: Task, items: Sequence[ChoiceItem], form: Form, shots: int) -> list[ItemResult]:
    queries = choice_queries(task, items, form, shots)
    contexts = [query.context for query in queries]
    if form == "cot":
        prompts = [reasoning_prompt(context, task.language) for context in contexts]
        thoughts = scorer.generate(prompts, REASONING_TOKENS, ANSWER_STOP)
        contexts = [
            concluded(prompt, thought, task.language) for prompt, thought in zip(prompts, thoughts, strict=True)
        ]
    pairs = [
        (context, continuation)
        for context, query in zip(contexts, queries, strict=True)
        for continuation in query.continuations
    ]
    scores = iter(scorer.score(pairs))
    return [
        _choice_result(item, query, form, [next(scores) for _ in query.continuations])
        for item, query in zip(items, queries, strict=True)
    ]


def _choice_result(item: ChoiceItem, query: ChoiceQuery, form: Form, scores: Sequence[Score | None]) -> ItemResult:
    nats = np.array([np.inf if score is None else score.nats for score in scores])
    sizes = np.array([max(1, len(text.encode())) for text in query.texts])
    right = sorted(item.answers)
    is_scored = bool(np.isfinite(nats[right]).all())
    per_byte = _best(nats / sizes, len(right)) == right
    return ItemResult(
        item.id,
        # Texts of options that were shown are copied rather than predicted: without the division, the shortest wins.
        per_byte if form != "cloze" and item.labels == "none" else _best(nats, len(right)) == right,
        item.chance,
        per_byte if form == "cloze" or item.labels == "none" else None,
        float(nats[right].sum()) if is_scored else 0.0,
        sum(len(query.continuations[index].encode()) for index in right) if is_scored else 0,
    )


def _best(nats: np.ndarray[tuple[int], np.dtype[np.float64]], count: int) -> list[int]:
    return sorted(int(index) for index in np.argsort(nats, kind="stable")[:count])


def _ask_clozes(scorer: Scorer, items: Sequence[ClozeItem]) -> list[ItemResult]:
    scores = scorer.score([(item.context, item.continuation) for item in items])
    return [
        _with_answer(item.id, is_right=score is not None and score.greedy, score=score, answer=item.continuation)
        for item, score in zip(items, scores, strict=True)
    ]


def _ask_answers(scorer: Scorer, task: Task, items: Sequence[AnswerItem], shots: int) -> list[ItemResult]:
    prompts = [answer_prompt(item, task.language, task.examples_of(item.subject, shots)) for item in items]
    scores = scorer.score([(prompt, f" {item.solution}") for prompt, item in zip(prompts, items, strict=True)])
    is_line = all(item.kind == "first-line" for item in items)
    texts = scorer.generate(prompts, LINE_TOKENS if is_line else REASONING_TOKENS, ANSWER_STOP)
    return [
        _with_answer(item.id, is_right=is_right_answer(item, text), score=score, answer=f" {item.solution}")
        for item, text, score in zip(items, texts, scores, strict=True)
    ]


def is_right_answer(item: AnswerItem, text: str) -> bool:
    """Whether a generated text gives the answer. Only its beginning counts: a model that writes on may hit anything."""
    if item.kind == "number":
        found = NUMBER.search(text)
        return found is not None and _same_number(found[1], item.answer)
    return _plain(first_line(text)) == _plain(item.answer)


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return text.strip().partition("\n")[0].strip()


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .。!！?？\"'“”")


def _same_number(text: str, answer: str) -> bool:
    try:
        return float(text.replace(",", "").rstrip(".")) == float(answer)
    except ValueError:
        return False


def _ask_codes(scorer: Scorer, items: Sequence[CodeItem], sandbox: Sandbox) -> list[ItemResult]:
    scores = scorer.score([(item.prompt, item.solution) for item in items])
    texts = scorer.generate([item.prompt for item in items], CODE_TOKENS, CODE_STOP)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        statuses = list(pool.map(lambda item, text: _code_status(sandbox, item, text), items, texts))
    return [
        replace(
            _with_answer(item.id, is_right=status == "ok", score=score, answer=item.solution),
            is_unsupported=status == "unsupported",
        )
        for item, status, score in zip(items, statuses, scores, strict=True)
    ]


def _code_status(sandbox: Sandbox, item: CodeItem, text: str) -> str:
    tests = f"{item.test}\ncheck({item.entry_point})\n"
    return sandbox.run_tests(item.prompt + text, tests, item.entry_point, _context(item.prompt)).status


def _context(prompt: str) -> str:
    """What a prompt defines before the function to complete; some tests use it."""
    for code in (prompt, prompt + "    pass\n"):
        with suppress(SyntaxError, ValueError):
            ast.parse(code)
            return code
    return ""


def _with_answer(item_id: str, *, is_right: bool, score: Score | None, answer: str) -> ItemResult:
    """The result of an answer that nobody gives by chance."""
    if score is None:
        return ItemResult(item_id, is_right, 0.0)
    return ItemResult(item_id, is_right, 0.0, None, score.nats, len(answer.encode()))
