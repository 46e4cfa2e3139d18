"""Whether a model has memorized a benchmark, by three signs.

- Mutations: changes of multiple-choice questions that a model which understands them survives, and one that memorized
  does not. Each is a function of the item and the seed. Controls take away what the answer depends on: a model that is
  still above chance does not need the question.
- Contamination: items with n-grams of the decontamination index in the training documents, 13 words or 20 characters of
  Chinese. An item is clean if no training document has any of them.
- Training on questions without their answers: a model that has seen the answers recalls them afterwards. One that has
  not cannot learn them from the questions, so its accuracy stays where it was.

Shapes: B rows of a batch, S sequence.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from zero2all.base.console import progress
from zero2all.base.manifest import read_documents_manifest
from zero2all.base.tasks import TaskEngine, available_cores
from zero2all.corpus.dedup.decontaminate import build_decontamination_index, find_ngrams
from zero2all.evals.bench.evaluate import choice_queries
from zero2all.evals.bench.items import WORDING, AnswerItem, ChoiceItem, ClozeItem, Form, Item, LabelStyle, Language
from zero2all.evals.bench.tasks import Task
from zero2all.evals.target import EvalTarget
from zero2all.model import IGNORE_INDEX, Z2all

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
    """Random numbers for the item and the mutation alone."""


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
    """Keep one of several right options."""
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


CLEAN = "clean"  # the version of a task with the items that are in no training document


@dataclass(frozen=True)
class Contamination:
    """How much of a task is in the training documents."""

    task: str
    shares: dict[str, float]
    """Shares by item: how many of its n-grams are in training documents. Items too short for an n-gram are not here."""
    items: int

    @property
    def found(self) -> int:
        """Number of items with an n-gram in a training document."""
        return sum(share > 0 for share in self.shares.values())

    @property
    def too_short(self) -> int:
        return self.items - len(self.shares)

    def is_clean(self, item_id: str) -> bool:
        """Whether nothing of an item was found; also if it is too short to tell."""
        return self.shares.get(item_id, 0.0) == 0

    def __str__(self) -> str:
        short = f"; {self.too_short} are too short to tell" if self.too_short else ""
        return f"{self.task}: {self.found} of {self.items} items have text in the training documents{short}"


def find_contamination_of(tasks: list[Task], documents: Path) -> list[Contamination]:
    """Compare every item with every training document of a corpus."""
    corpus = read_documents_manifest(documents)
    shards = [documents / "train" / shard for part in corpus.splits["train"].values() for shard in part.shards]
    names = {f"{number}/{item.id}": (number, item) for number, task in enumerate(tasks) for item in task.items}
    with tempfile.TemporaryDirectory() as folder:
        texts = {name: _item_texts(item) for name, (_, item) in names.items()}
        index = build_decontamination_index(texts, Path(folder))
        found = np.zeros(len(index.ngrams), dtype=bool)
        engine = TaskEngine(workers=min(available_cores(), max(1, len(shards))))
        with progress("comparing items with training documents", len(shards)) as advance:
            arguments = [(shard, Path(folder)) for shard in shards]
            for places in engine.run(find_ngrams, arguments, lambda number: advance(1)):
                found[places] = True
    totals = np.bincount(index.owners, minlength=len(index.names))
    hits = np.bincount(index.owners, weights=found, minlength=len(index.names))
    shares: list[dict[str, float]] = [{} for _ in tasks]
    for name, total, hit in zip(index.names, totals, hits, strict=True):
        number, item = names[name]
        if total:
            shares[number][item.id] = float(hit / total)
    return [Contamination(task.name, own, len(task.items)) for task, own in zip(tasks, shares, strict=True)]


def _item_texts(item: Item) -> list[str]:
    """The texts of an item, each by itself: what is between them is ours."""
    if isinstance(item, ChoiceItem):
        return [item.passage, item.question, *item.options]
    if isinstance(item, ClozeItem):
        return [item.context + item.continuation]
    if isinstance(item, AnswerItem):
        return [item.question, item.solution]
    return [item.prompt, item.solution]


LEARNING_RATE = 1e-4  # a tenth of what a small model is pretrained with, so that little is forgotten
BATCH_SIZE = 16
PASSES = 2  # over the questions


def train_on_questions(target: EvalTarget, task: Task, form: Form, seed: int = 0) -> EvalTarget:
    """The target with a copy of its model, trained on the questions and options of a task, never on an answer."""
    tokenizer, limit = target.tokenizer, target.model.config.max_position_embeddings
    contexts = [query.context for query in choice_queries(task, task.choice_items, form, shots=0)]
    texts = [[tokenizer.eos_token_id, *tokenizer.encode(context)][-limit:] for context in contexts]
    model = deepcopy(target.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with progress("training on questions without answers", PASSES * len(texts)) as advance:
        for batch in _batches(texts, seed):
            _step(model, optimizer, batch)
            advance(len(batch))
    return replace(target, model=model.eval())


def _batches(texts: Sequence[list[int]], seed: int) -> Iterator[list[list[int]]]:
    rng = random.Random(seed)
    for _ in range(PASSES):
        order = list(texts)
        rng.shuffle(order)
        for start in range(0, len(order), BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def _step(model: Z2all, optimizer: torch.optim.Optimizer, batch: list[list[int]]) -> None:
    tokens_BS, targets_BS = _pad(batch, model.rotary_2SE.device)
    losses = model(tokens_BS, targets_BS=targets_BS)
    (losses.sum() / (targets_BS != IGNORE_INDEX).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _pad(batch: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [B, S] each."""
    size = max(2, *(len(text) for text in batch)) - 1
    tokens_BS = torch.zeros(len(batch), size, dtype=torch.int64)
    targets_BS = torch.full((len(batch), size), IGNORE_INDEX)
    for row, text in enumerate(batch):
        tokens_BS[row, : len(text) - 1] = torch.tensor(text[:-1])
        targets_BS[row, : len(text) - 1] = torch.tensor(text[1:])
    return tokens_BS.to(device), targets_BS.to(device)
