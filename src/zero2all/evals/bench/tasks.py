"""Benchmarks on local files: which there are, how their files are read, and how they are asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero2all.errors import UsageError
from zero2all.evals.bench.items import ChoiceItem, Form, Item, Language
from zero2all.evals.bench.readers import (
    read_agieval,
    read_arc,
    read_cmmlu,
    read_gaokao_bench,
    read_gsm8k,
    read_humaneval,
    read_lambada,
    read_mmlu,
)
from zero2all.evals.bench.subjects import describe_cmmlu, describe_mmlu


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
    """Of the development split; empty if the files have none."""
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
