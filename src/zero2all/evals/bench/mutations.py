"""Changes of multiple-choice questions that a model which understands them survives, and one that memorised does not.

Each is a function of the item and the seed. Controls take away what the answer depends on: a model that is still
above chance does not need the question.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zero2all.evals.bench.items import AnswerItem, ChoiceItem, Item, LabelStyle, Language
from zero2all.evals.bench.prompts import WORDING
from zero2all.evals.bench.tasks import Task

NONE_OF_THE_OTHERS: dict[Language, str] = {"en": "None of the other options", "zh": "其他选项都不对"}
# An option such as "all of the above" or "A和B" is another one after a permutation.
_REFERS_TO_OPTIONS = re.compile(
    r"\b(all|none|both|neither|any|either) of (the|these|those|them)\b|\babove\b|\b[A-D] (and|or) [A-D]\b|"
    r"以上|上述|前者|后者|均(对|错|正确|可|是|不)|都(对|错|正确|可以|是|不)|选项|[A-D]\s*[和与或、]\s*[A-D]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Context:
    """What a mutation may use beside the item."""

    language: Language
    others: Sequence[ChoiceItem]
    """All items of the task, or all its examples."""
    rng: random.Random
    """Of the item and the mutation alone."""


@dataclass(frozen=True)
class Mutation:
    """A change of items. It does not apply to every item."""

    name: str
    apply: Callable[[ChoiceItem, Context], Item | None]
    changes_cloze: bool = True
    """Whether the cloze form, which shows neither options nor labels, changes too."""
    changes_examples: bool = False
    """Whether the examples in prompts change too. Labels always do."""
    is_control: bool = False
    """Whether a model is expected to fall to chance."""


def refers_to_options(item: ChoiceItem) -> bool:
    """Whether an option means other options, by their place or all of them."""
    return any(_REFERS_TO_OPTIONS.search(option) for option in item.options)


def permute(item: ChoiceItem, context: Context) -> ChoiceItem | None:
    """Options in another order."""
    if refers_to_options(item):
        return None
    order = list(range(len(item.options)))
    context.rng.shuffle(order)
    return replace(
        item,
        options=tuple(item.options[index] for index in order),
        answers=tuple(sorted(order.index(answer) for answer in item.answers)),
    )


def relabel(style: LabelStyle) -> Callable[[ChoiceItem, Context], ChoiceItem | None]:
    def apply(item: ChoiceItem, context: Context) -> ChoiceItem | None:
        return None if refers_to_options(item) else replace(item, labels=style)

    return apply


def replace_answer(item: ChoiceItem, context: Context) -> ChoiceItem | None:
    """The right answer becomes "none of the others", which then is right."""
    if len(item.answers) > 1 or refers_to_options(item):
        return None
    options = list(item.options)
    options[item.answers[0]] = NONE_OF_THE_OTHERS[context.language]
    return replace(item, options=tuple(options))


def keep_one_answer(item: ChoiceItem, context: Context) -> ChoiceItem | None:
    """Of several right options one is left."""
    if len(item.answers) == 1 or len(item.answers) == len(item.options):
        return None
    kept = context.rng.choice(item.answers)
    remaining = [index for index in range(len(item.options)) if index == kept or index not in item.answers]
    return replace(item, options=tuple(item.options[index] for index in remaining), answers=(remaining.index(kept),))


def ask_for_text(item: ChoiceItem, context: Context) -> AnswerItem | None:
    """The options are context, in another order and without labels; the answer is generated."""
    if len(item.answers) > 1 or refers_to_options(item):
        return None
    options = list(item.options)
    context.rng.shuffle(options)
    shown = "".join(f"- {option}\n" for option in options)
    answer = item.options[item.answers[0]]
    passage = f"{item.passage.strip()}\n" if item.passage.strip() else ""
    question = f"{passage}{item.question.strip()}\n{WORDING[context.language].possible_answers}\n{shown}".rstrip("\n")
    return AnswerItem(item.id, question, answer, answer, "first-line", item.subject)


def remove_stem(item: ChoiceItem, context: Context) -> ChoiceItem:
    return replace(item, question="", passage="")


def swap_stem(item: ChoiceItem, context: Context) -> ChoiceItem | None:
    """The question of another item of the same subject."""
    others = [one for one in context.others if one.subject == item.subject and one.question != item.question]
    if not others:
        return None
    other = context.rng.choice(others)
    return replace(item, question=other.question, passage=other.passage)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("permuted", permute, changes_cloze=False),
    Mutation("labels-chinese", relabel("chinese"), changes_cloze=False),
    Mutation("labels-roman", relabel("roman"), changes_cloze=False),
    Mutation("labels-none", relabel("none"), changes_cloze=False),
    Mutation("none-of-the-others", replace_answer),
    Mutation("single-answer", keep_one_answer),
    Mutation("generative", ask_for_text, changes_examples=True),
    Mutation("stem-removed", remove_stem, is_control=True),
    Mutation("stem-swapped", swap_stem, is_control=True),
)


def mutate(task: Task, mutation: Mutation, seed: int) -> Task | None:
    """The task with the items that the mutation applies to; None if there are none."""

    def apply(items: Sequence[Item]) -> tuple[Item, ...]:
        choices = [item for item in items if isinstance(item, ChoiceItem)]
        mutated = [
            mutation.apply(item, Context(task.language, choices, random.Random(f"{seed}/{mutation.name}/{item.id}")))
            for item in choices
        ]
        return tuple(item for item in mutated if item is not None)

    items = apply(task.items)
    examples = apply(task.examples) if mutation.changes_examples else task.examples
    return replace(task, items=items, examples=examples) if items else None
