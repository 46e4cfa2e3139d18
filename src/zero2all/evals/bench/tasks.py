"""Benchmarks on local files: which there are, how their files are read as their authors publish them, and how they are
asked."""

from __future__ import annotations

import csv
import gzip
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.package_data import read_package_table
from zero2all.base.records import decode_json
from zero2all.evals.bench.items import LABELS, AnswerItem, ChoiceItem, ClozeItem, CodeItem, Form, Item, Language

LETTERS = LABELS["letters"]
Split = tuple[list[Item], list[Item]]
"""Items, and examples for prompts."""


def read_arc(path: Path) -> Split:
    """ARC as in the Hugging Face dataset. Options may be labelled with digits."""
    return [
        ChoiceItem(
            id=row["id"],
            question=row["question"],
            options=tuple(row["choices"]["text"]),
            answers=(row["choices"]["label"].index(row["answerKey"]),),
        )
        for row in _json_lines(path, ("id", "question", "choices", "answerKey"))
    ], []


def read_mmlu(directory: Path) -> Split:
    """MMLU: ``test/SUBJECT_test.csv``, ``dev/SUBJECT_dev.csv``; with a header and indices, or without and letters."""

    def read(path: Path, subject: str) -> Iterator[Item]:
        for number, row in enumerate(_csv_rows(path)):
            if row[-1] == "answer":
                continue
            question, *options, answer = row
            index = int(answer) if answer.isdigit() else LETTERS.index(answer)
            yield ChoiceItem(f"{path.stem}/{number}", question, tuple(options), (index,), subject)

    return _read_splits(directory, read)


def read_cmmlu(directory: Path) -> Split:
    """CMMLU: ``test/SUBJECT.csv`` and ``dev/SUBJECT.csv``."""

    def read(path: Path, subject: str) -> Iterator[Item]:
        for row in _csv_rows(path):
            number, question, *options, answer = row
            if answer != "Answer":
                yield ChoiceItem(
                    f"{subject}/{number}", question, tuple(options), (LETTERS.index(answer.strip()),), subject
                )

    return _read_splits(directory, read)


def read_agieval(path: Path) -> Split:
    """AGIEval. Options begin with their letter in brackets; a question may have several right ones."""
    items: list[Item] = []
    for number, row in enumerate(_json_lines(path, ("question", "options", "label"))):
        options = tuple(re.sub(r"^\([A-J]\)\s*", "", option) for option in row["options"])
        answers = tuple(LETTERS.index(letter) for letter in re.findall(r"[A-J]", row["label"]))
        item_id = f"{path.stem}/{number}"
        items.append(ChoiceItem(item_id, row["question"], options, answers, passage=row.get("passage") or ""))
    return items, []


def read_gaokao_bench(path: Path) -> Split:
    """GAOKAO-Bench: questions whose text contains their options. Several questions may share a text."""
    content = _parse(path, path.read_text(encoding="utf-8"))
    items: list[Item] = []
    for row in content["example"]:
        for number, item in enumerate(_gaokao_questions(row["question"], row["answer"])):
            question, options, answers, passage = item
            item_id = f"{content['keywords']}/{row['index']}/{number}"
            items.append(ChoiceItem(item_id, question, options, answers, content["keywords"], passage))
    return items, []


def read_lambada(path: Path) -> Split:
    items: list[Item] = []
    for number, row in enumerate(_json_lines(path, ("text",))):
        context, _, word = row["text"].rpartition(" ")
        items.append(ClozeItem(f"lambada/{number}", context, f" {word}"))
    return items, []


def read_gsm8k(path: Path) -> Split:
    items: list[Item] = []
    for number, row in enumerate(_json_lines(path, ("question", "answer"))):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        items.append(AnswerItem(f"gsm8k/{number}", row["question"], answer, row["answer"], "number"))
    return items, []


def read_humaneval(path: Path) -> Split:
    return [
        CodeItem(row["task_id"], row["prompt"], row["canonical_solution"], row["test"], row["entry_point"])
        for row in _json_lines(path, ("task_id", "prompt", "canonical_solution", "test", "entry_point"))
    ], []


def _read_splits(directory: Path, read: Callable[[Path, str], Iterator[Item]]) -> Split:
    def split(name: str) -> list[Item]:
        paths = sorted((directory / name).glob("*.csv"))
        return [item for path in paths for item in read(path, path.stem.removesuffix(f"_{name}"))]

    return split("test"), split("dev")


def _csv_rows(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            if len(row) < 4:
                raise Z2aError(f"{path} has a row of {len(row)} columns, which is no question")
            yield row


def _json_lines(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = _parse(path, line, number)
                if missing := [key for key in keys if key not in row]:
                    raise Z2aError(f"{path}, line {number}: no {', '.join(missing)}")
                yield row


def _parse(path: Path, text: str, number: int = 1) -> dict[str, Any]:
    try:
        parsed = decode_json(text)
    except ValueError as error:
        raise Z2aError(f"{path}, line {number}: {error}") from None
    if not isinstance(parsed, dict):
        raise Z2aError(f"{path}, line {number}: not a JSON object")
    return parsed


_NUMBER = re.compile(r"(?:^|(?<=\s)|(?<=[。．）]))(\d{1,2})\s*．")
_OPTION = re.compile(r"(?<![A-Za-z])([A-D])\s*[．.、]")


def _gaokao_questions(text: str, answers: list[str]) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...], str]]:
    """Question, options, right options and shared text of each question; none if the text cannot be split surely."""
    parts = [text] if len(answers) == 1 else _NUMBER.split(text)
    passage, stems = ("", parts) if len(answers) == 1 else (parts[0], parts[2::2])
    if len(stems) != len(answers):
        return
    for stem, answer in zip(stems, answers, strict=True):
        marks = list(_OPTION.finditer(stem))[-4:]
        if [mark[1] for mark in marks] != list("ABCD"):
            continue
        ends = [mark.start() for mark in marks[1:]] + [len(stem)]
        options = tuple(_joined(stem[mark.end() : end]) for mark, end in zip(marks, ends, strict=True))
        indices = tuple(LETTERS.index(letter) for letter in answer if letter in "ABCD")
        if indices and all(options):
            yield _joined(stem[: marks[0].start()]), options, indices, passage.strip()


def _joined(text: str) -> str:
    """Lines that were broken by the width of a page are joined."""
    return "".join(map(str.strip, text.split("\n")))


CMMLU_SUBJECTS: dict[str, str] = read_package_table(__package__, "cmmlu_subjects.toml")


def describe_mmlu(subject: str) -> str:
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def describe_cmmlu(subject: str) -> str:
    return f"以下是关于{CMMLU_SUBJECTS.get(subject, subject)}的单项选择题，请直接给出正确答案的选项。\n\n"


@dataclass(frozen=True)
class Task:
    """A benchmark that has been read."""

    name: str
    language: Language
    form: Form | None
    """How multiple-choice questions are asked unless told otherwise; None if there are none."""
    shots: int | None
    """Number of examples in a prompt, unless told otherwise; None if prompts cannot have any."""
    items: tuple[Item, ...]
    examples: tuple[Item, ...]
    """Items of the development split; empty if the files have none."""
    describe: Callable[[str], str] | None = None
    """The first lines of a letter prompt, by subject."""

    @property
    def choice_items(self) -> tuple[ChoiceItem, ...]:
        return tuple(item for item in self.items if isinstance(item, ChoiceItem))

    def description(self, subject: str, form: Form) -> str:
        return self.describe(subject) if self.describe is not None and form != "cloze" else ""

    def examples_of(self, subject: str, count: int) -> Sequence[Item]:
        """The first examples of the subject, in the order of the file."""
        return [item for item in self.examples if item.subject == subject][:count] if count else []

    def with_shots(self, count: int) -> Task:
        """The task for prompts with ``count`` examples.

        Without a development split they are the first items of each subject, which are then not asked.
        """
        if self.examples or count == 0:
            return self
        examples: list[Item] = []
        items: list[Item] = []
        for item in self.items:
            is_early = sum(one.subject == item.subject for one in examples) < count
            (examples if is_early else items).append(item)
        if not items:
            raise UsageError(f"{self.name} has {len(self.items)} items: too few for {count} examples (--shots)")
        return replace(self, examples=tuple(examples), items=tuple(items))

    def sample(self, limit: int | None, seed: int) -> Task:
        """``limit`` items at random, in the order of the file."""
        if limit is None or limit >= len(self.items):
            return self
        chosen = sorted(random.Random(f"{seed}/{self.name}").sample(range(len(self.items)), limit))
        return replace(self, items=tuple(self.items[index] for index in chosen))


@dataclass(frozen=True)
class TaskFiles:
    """Where the files of a benchmark are, and how they are read."""

    pattern: str
    """Relative to the directory of benchmarks."""
    read: Callable[[Path], tuple[list[Item], list[Item]]]
    """Items and examples from the matching path."""
    language: Language
    form: Form | None
    shots: int | None = 0
    describe: Callable[[str], str] | None = None


TASKS: dict[str, TaskFiles] = {
    "arc_easy": TaskFiles("arc_easy_test.jsonl", read_arc, "en", "cloze"),
    "arc_challenge": TaskFiles("arc_challenge_test.jsonl", read_arc, "en", "cloze"),
    "mmlu": TaskFiles("mmlu", read_mmlu, "en", "letter", describe=describe_mmlu),
    "cmmlu": TaskFiles("cmmlu", read_cmmlu, "zh", "letter", describe=describe_cmmlu),
    "agieval_sat-math": TaskFiles("agieval_sat-math.jsonl", read_agieval, "en", "letter"),
    **{
        f"agieval_gaokao-{subject}": TaskFiles(f"agieval_gaokao-{subject}.jsonl", read_agieval, "zh", "letter")
        for subject in ("biology", "chemistry", "chinese", "geography", "history", "mathqa", "physics")
    },
    "gaokao_bench": TaskFiles("gaokao_bench_*.json", read_gaokao_bench, "zh", "letter"),
    "lambada": TaskFiles("lambada_openai_test.jsonl", read_lambada, "en", None, shots=None),
    "gsm8k": TaskFiles("gsm8k_test.jsonl", read_gsm8k, "en", None, shots=5),
    "humaneval": TaskFiles("HumanEval.jsonl*", read_humaneval, "en", None, shots=None),
}


def find_tasks(data: Path) -> list[str]:
    """Names of the benchmarks whose files are in a directory."""
    return [name for name, files in TASKS.items() if any(data.glob(files.pattern))]


def read_tasks(data: Path, names: Sequence[str]) -> Iterator[Task]:
    """The named benchmarks, or all whose files are there. Names and files are checked before the first is read."""
    present = find_tasks(data)
    for name in names:
        if name not in TASKS:
            raise UsageError(f"no benchmark is called {name}; known are {', '.join(TASKS)}")
        if name not in present:
            raise UsageError(f"{data} has no files of {name} ({TASKS[name].pattern}); it has {', '.join(present)}")
    for name in names or present:
        files = TASKS[name]
        items: list[Item] = []
        examples: list[Item] = []
        for path in sorted(data.glob(files.pattern)):
            more_items, more_examples = files.read(path)
            items += more_items
            examples += more_examples
        if not items:
            raise UsageError(f"the files of {name} in {data} have no items")
        if len({item.id for item in items}) < len(items):
            raise UsageError(f"the files of {name} in {data} have items with the same id")
        yield Task(name, files.language, files.form, files.shots, tuple(items), tuple(examples), files.describe)
