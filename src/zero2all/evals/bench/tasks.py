"""Benchmarks on local files: a benchmark that has been read, and how one is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero2all.base.errors import UsageError
from zero2all.base.plugins import PluginSpec, bind, builtin, find_plugin
from zero2all.evals.bench.items import ChoiceItem, Form, Item, Language

Split = tuple[list[Item], list[Item]]
"""Items, and examples for prompts."""


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
    """What a benchmark is registered with: where its files are, and how it is asked."""

    language: Language
    pattern: str | None = None
    """Relative to the directory of benchmarks. None: the function reads what it finds in the directory, if anything."""
    form: Form | None = None
    shots: int | None = 0
    describe: Callable[[str], str] | None = None

    def paths(self, data: Path) -> list[Path]:
        return [data] if self.pattern is None else sorted(data.glob(self.pattern))


def find_tasks(data: Path) -> list[str]:
    """Names of the built-in benchmarks whose files are in a directory."""
    return [one.name for one in builtin("task") if TaskFiles(**one.details).paths(data)]


def read_tasks(data: Path, specs: Sequence[PluginSpec]) -> Iterator[Task]:
    """The named benchmarks, or all whose files are there. Names and files are checked before the first is read."""
    present = find_tasks(data)
    chosen = [bind("task", spec) for spec in specs or present]
    for bound in chosen:
        files = TaskFiles(**find_plugin("task", bound.name).details)
        if not files.paths(data):
            raise UsageError(f"{data} has no files of {bound.name} ({files.pattern}); it has {', '.join(present)}")
    for bound in chosen:
        name, files = bound.name, TaskFiles(**find_plugin("task", bound.name).details)
        items: list[Item] = []
        examples: list[Item] = []
        for path in files.paths(data):
            more_items, more_examples = bound(path)
            items += more_items
            examples += more_examples
        if not items:
            raise UsageError(f"the files of {name} in {data} have no items")
        if len({item.id for item in items}) < len(items):
            raise UsageError(f"the files of {name} in {data} have items with the same id")
        yield Task(name, files.language, files.form, files.shots, tuple(items), tuple(examples), files.describe)
