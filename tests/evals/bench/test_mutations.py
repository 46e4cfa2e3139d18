"""Mutations keep the right answer, and tell a model that memorized from one that did not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.evals.bench.fakes import FakeScorer, always, random_items, random_task
from zero2all.evals.bench.evaluate import choice_queries, evaluate_task
from zero2all.evals.bench.items import AnswerItem, ChoiceItem
from zero2all.evals.bench.memorization import MUTATIONS, NONE_OF_THE_OTHERS, Context, mutate, refers_to_options
from zero2all.evals.bench.report import ORIGINAL, BenchEvaluation, Difference, compare, summarize
from zero2all.evals.bench.tasks import Task, read_tasks

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


def mutated(task: Task, name: str, seed: int = 0) -> Task:
    changed = mutate(task, BY_NAME[name], seed)
    assert changed is not None
    return changed


def gap(scorer: FakeScorer, task: Task, name: str) -> Difference:
    original = BenchEvaluation("m", task.name, "letter", 0, ORIGINAL, evaluate_task(scorer, task))
    other = BenchEvaluation("m", task.name, "letter", 0, name, evaluate_task(scorer, mutated(task, name)))
    return compare(original, other, (ORIGINAL, name), ("centered_accuracy",))[0]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutation_depends_on_item_and_seed_alone(name: str) -> None:
    items = (*random_items(40), ChoiceItem("two", "?", ("a", "b", "c", "d"), (0, 3), "subject"))
    task = Task("t", "en", "letter", 0, items, ())
    assert mutated(task, name) == mutated(task, name)
    if name in ("permuted", "generative", "stem-swapped"):
        assert mutated(task, name) != mutated(task, name, 1)
    if name == "permuted":  # also beside fewer items
        few = Task("t", "en", "letter", 0, task.items[5:7], ())
        assert mutated(few, name).items == mutated(task, name).items[5:7]


@pytest.mark.parametrize("name", ["permuted", "labels-chinese", "labels-roman", "labels-none"])
def test_the_text_of_the_right_answer_stays(name: str) -> None:
    task = random_task(200)
    changed = mutated(task, name)
    for item, other in zip(task.choice_items, changed.choice_items, strict=True):
        assert sorted(other.options) == sorted(item.options)
        assert other.options[other.answers[0]] == item.options[item.answers[0]]
    if name == "permuted":
        positions = [other.answers[0] for other in changed.choice_items]
        assert all(30 < positions.count(position) < 70 for position in range(4))


def test_labels_of_question_and_examples_are_replaced() -> None:
    task = random_task(3)
    for name, labels in (("labels-chinese", "一二三四"), ("labels-roman", ("I", "II", "III", "IV"))):
        changed = mutated(task, name)
        query = choice_queries(changed, changed.choice_items, "letter", 2)[0]
        assert query.continuations == tuple(f" {label}" for label in labels)
        assert query.context.count(f"\n{labels[1]}. option") == 3
        assert "A." not in query.context
    changed = mutated(task, "labels-none")
    query = choice_queries(changed, changed.choice_items, "letter", 0)[0]
    assert query.continuations[0] == f" {changed.choice_items[0].options[0]}"
    assert query.context.count("\n- option") == 4


def test_none_of_the_others_is_right_where_the_answer_was() -> None:
    task = random_task(20)
    for item, other in zip(task.choice_items, mutated(task, "none-of-the-others").choice_items, strict=True):
        assert other.answers == item.answers
        assert other.options[other.answers[0]] == NONE_OF_THE_OTHERS["en"]
        assert sum(one == two for one, two in zip(item.options, other.options, strict=True)) == 3


def test_of_several_answers_one_is_left() -> None:
    several = ChoiceItem("a", "?", ("a", "b", "c", "d"), (0, 2, 3))
    every = ChoiceItem("b", "?", ("a", "b"), (0, 1))
    task = Task("t", "en", "letter", 0, (several, every, *random_items(2)), ())
    (item,) = mutated(task, "single-answer").choice_items
    assert len(item.options) == 2
    assert item.options[item.answers[0]] in "acd"
    assert "b" in item.options


def test_the_generative_question_shows_all_options_and_is_answered_with_text() -> None:
    task = random_task(30)
    changed = mutated(task, "generative")
    item = changed.items[0]
    assert isinstance(item, AnswerItem)
    assert all(f"- {option}" in item.question for option in task.choice_items[0].options)

    def answer(prompt: str) -> str:
        question = prompt.rpartition("Question: ")[2].splitlines()[0]
        right = next(one for one in task.choice_items if one.question == question)
        return f" {right.options[right.answers[0]]}\nand more"

    results = evaluate_task(FakeScorer(lambda context, continuation: 1.0, answer), changed, "letter", 2)
    assert all(result.is_right for result in results)
    assert isinstance(changed.examples[0], AnswerItem)


def test_controls_take_the_question_away() -> None:
    task = random_task(50)
    removed = mutated(task, "stem-removed")
    assert "question" not in choice_queries(removed, removed.choice_items, "letter", 0)[0].context
    for item, other in zip(task.choice_items, mutated(task, "stem-swapped").choice_items, strict=True):
        assert other.question != item.question
        assert other.options == item.options
    alone = Task("t", "en", "letter", 0, task.items[:1], ())
    assert mutate(alone, BY_NAME["stem-swapped"], 0) is None


@pytest.mark.parametrize(
    "option",
    [
        "All of the above",
        "Both of these",
        "A and C",
        "none of the above",
        "以上都对",
        "上述选项均正确",
        "A和B",
        "都不是",
    ],
)
def test_options_that_mean_other_options_are_not_moved(option: str) -> None:
    item = ChoiceItem("a", "?", ("x", "y", "z", option), (3,))
    assert refers_to_options(item)
    context = Context("en", (item,), random.Random(0))
    assert BY_NAME["permuted"].apply(item, context) is None
    assert BY_NAME["labels-roman"].apply(item, context) is None
    assert BY_NAME["stem-removed"].apply(item, context) is not None


def test_plain_options_may_be_moved() -> None:
    for options in (("Paris", "a band", "Vitamin A", "abovementioned"), ("北京", "都江堰", "和平", "选举")):
        assert not refers_to_options(ChoiceItem("a", "?", options, (0,)))


def test_a_model_that_always_answers_a_is_at_chance_under_permutation() -> None:
    items = random_items(800)
    all_a = tuple(
        ChoiceItem(item.id, item.question, item.options, (0,), item.subject) for item in items
    )  # every answer is A
    task = Task("t", "en", "letter", 0, all_a, ())
    permuted = evaluate_task(always("A"), mutated(task, "permuted"))
    assert summarize(BenchEvaluation("m", "t", "letter", 0, "permuted", permuted)).centered_accuracy.contains(0)
    found = gap(always("A"), task, "permuted")
    assert found.is_significant
    assert found.difference.value < -0.7


def test_memorized_letters_show_and_knowledge_does_not() -> None:
    task = random_task(200)
    letters = {item.question: " " + "ABCD"[item.answers[0]] for item in task.choice_items}
    texts = {item.options[item.answers[0]] for item in task.choice_items}

    def memorized(context: str, continuation: str) -> float:
        return 0.1 if letters[context.splitlines()[0]] == continuation else 3.0

    def known(context: str, continuation: str) -> float:
        line = next((line for line in context.splitlines() if line.startswith(f"{continuation.strip()}. ")), "")
        return 0.1 if line.partition(". ")[2] in texts else 3.0

    for name in ("permuted", "labels-roman"):
        assert gap(FakeScorer(memorized), task, name).difference.high < -0.3
        assert gap(FakeScorer(known), task, name).difference.contains(0.0)
    assert gap(FakeScorer(memorized), task, "none-of-the-others").difference.value == 0


def test_a_model_at_chance_loses_nothing_to_a_generative_question() -> None:
    task = random_task(300)
    rng = random.Random(2)
    guessing = FakeScorer(lambda context, continuation: rng.random(), lambda prompt: "no idea")
    assert gap(guessing, task, "generative").difference.contains(0.0)


def test_most_items_of_the_shared_corpus_can_be_permuted(shared_corpus: Path) -> None:
    for task in read_tasks(shared_corpus / "eval", ["arc_easy", "cmmlu", "mmlu"]):
        changed = mutated(task, "permuted")
        assert len(changed.items) > 0.85 * len(task.items), task.name
