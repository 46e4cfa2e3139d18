"""Benchmarks whose files are read as their authors publish them."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zero2all.base.errors import Z2aError
from zero2all.base.package_data import read_package_table
from zero2all.base.plugins import register
from zero2all.base.records import decode_json
from zero2all.evals.bench.items import LABELS, AnswerItem, ChoiceItem, ClozeItem, CodeItem, Item
from zero2all.evals.bench.tasks import Split

LETTERS = LABELS["letters"]


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
    """LAMBADA: the last word of a text."""
    items: list[Item] = []
    for number, row in enumerate(_json_lines(path, ("text",))):
        context, _, word = row["text"].rpartition(" ")
        items.append(ClozeItem(f"lambada/{number}", context, f" {word}"))
    return items, []


def read_gsm8k(path: Path) -> Split:
    """GSM8K: word problems, with the number after ``####`` as the answer."""
    items: list[Item] = []
    for number, row in enumerate(_json_lines(path, ("question", "answer"))):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        items.append(AnswerItem(f"gsm8k/{number}", row["question"], answer, row["answer"], "number"))
    return items, []


def read_humaneval(path: Path) -> Split:
    """HumanEval: functions to complete, with their tests."""
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


for _name in ("arc_easy", "arc_challenge"):
    register("task", _name, pattern=f"{_name}_test.jsonl", language="en", form="cloze")(read_arc)
register("task", "mmlu", pattern="mmlu", language="en", form="letter", describe=describe_mmlu)(read_mmlu)
register("task", "cmmlu", pattern="cmmlu", language="zh", form="letter", describe=describe_cmmlu)(read_cmmlu)
AGIEVAL = {
    "sat-math": "en", "gaokao-biology": "zh", "gaokao-chemistry": "zh", "gaokao-chinese": "zh",
    "gaokao-geography": "zh", "gaokao-history": "zh", "gaokao-mathqa": "zh", "gaokao-physics": "zh",
}  # fmt: skip
for _name, _language in AGIEVAL.items():
    _file = f"agieval_{_name}.jsonl"
    register("task", f"agieval_{_name}", pattern=_file, language=_language, form="letter")(read_agieval)
register("task", "gaokao_bench", pattern="gaokao_bench_*.json", language="zh", form="letter")(read_gaokao_bench)
register("task", "lambada", pattern="lambada_openai_test.jsonl", language="en", shots=None)(read_lambada)
register("task", "gsm8k", pattern="gsm8k_test.jsonl", language="en", shots=5)(read_gsm8k)
register("task", "humaneval", pattern="HumanEval.jsonl*", language="en", shots=None)(read_humaneval)
