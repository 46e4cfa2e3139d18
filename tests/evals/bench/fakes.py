"""Stand-ins for models, and benchmark files written for the tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from zero2all.evals.bench.items import ChoiceItem
from zero2all.evals.bench.tasks import Task
from zero2all.evals.log_likelihood import Score


class FakeScorer:
    """Nats of a continuation by a function of context and continuation; texts by a function of the prompt."""

    def __init__(
        self, nats: Callable[[str, str], float], text: Callable[[str], str] = lambda prompt: "", limit: int = 10**6
    ) -> None:
        self.nats, self.text, self.limit = nats, text, limit
        self.pairs: list[tuple[str, str]] = []
        self.prompts: list[str] = []
        self.stops: list[tuple[str, ...]] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score | None]:
        self.pairs += pairs
        return [
            Score(nats := self.nats(context, continuation), nats < 1) if len(continuation) <= self.limit else None
            for context, continuation in pairs
        ]

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: tuple[str, ...]) -> list[str]:
        self.prompts += prompts
        self.stops.append(stop)
        return [self.text(prompt) for prompt in prompts]


def always(letter: str) -> FakeScorer:
    return FakeScorer(lambda context, continuation: 0.1 if continuation == f" {letter}" else 5.0)


def random_items(count: int, options: int = 4, seed: int = 0) -> tuple[ChoiceItem, ...]:
    rng = random.Random(seed)
    return tuple(
        ChoiceItem(
            f"q/{number}",
            f"What is question {number}?",
            tuple(f"option {rng.randrange(10**6)} of {number}" for _ in range(options)),
            (rng.randrange(options),),
            "subject",
        )
        for number in range(count)
    )


def random_task(count: int, options: int = 4) -> Task:
    items = random_items(count + 3, options)
    return Task("questions", "en", "letter", 0, items[3:], items[:3])


def write_benchmarks(directory: Path) -> Path:
    """Files of a few items of each benchmark, as they are published."""
    arc = {"choices": {"text": ["red", "blue", "green"], "label": ["1", "2", "3"]}, "answerKey": "2"}
    rows = [{"id": f"arc/{number}", "question": f"Colour {number}?", **arc} for number in range(4)]
    _write_lines(directory / "arc_easy_test.jsonl", rows)
    for split, count in (("dev", 3), ("test", 4)):
        (directory / "cmmlu" / split).mkdir(parents=True)
        lines = [
            ",Question,A,B,C,D,Answer",
            *(f"{n},问题{split}{n} ,甲{n},乙,丙,丁,{'ABCD'[n % 4]}" for n in range(count)),
        ]
        (directory / "cmmlu" / split / "agronomy.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (directory / "mmlu" / split).mkdir(parents=True)
        lines = [
            "question,choice0,choice1,choice2,choice3,answer",
            *(f"{split} {n}?,w,x,y,z,{n}" for n in range(count)),
        ]
        (directory / "mmlu" / split / f"high_school_physics_{split}.csv").write_text("\n".join(lines) + "\n")
    _write_lines(
        directory / "gsm8k_test.jsonl",
        [{"question": f"{n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"} for n in range(8)],
    )
    _write_lines(
        directory / "lambada_openai_test.jsonl", [{"text": f"The {n} dogs bark at the moon"} for n in range(3)]
    )
    code = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f"}
    _write_lines(
        directory / "HumanEval.jsonl",
        [{"task_id": f"HumanEval/{n}", "test": "def check(f):\n    assert f(2) == 2\n", **code} for n in range(2)],
    )
    return directory


def _write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
