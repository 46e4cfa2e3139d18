"""Prompts are those of lm-eval, and answers are counted as they should be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evals.bench.fakes import FakeScorer, always, random_items, random_task, write_benchmarks
from zero2all.base.errors import UsageError, Z2aError
from zero2all.evals.bench.evaluate import choice_queries, evaluate_task, first_line, is_right_answer
from zero2all.evals.bench.items import AnswerItem, ChoiceItem, CodeItem, Form
from zero2all.evals.bench.report import ORIGINAL, BenchEvaluation, summarize
from zero2all.evals.bench.tasks import Task, read_tasks
from zero2all.sandbox import Sandbox


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_benchmarks(tmp_path)


def read(data: Path, name: str) -> Task:
    return next(read_tasks(data, [name]))


CMMLU = (
    "以下是关于农学的单项选择题，请直接给出正确答案的选项。\n\n"
    "问题dev0\nA. 甲0\nB. 乙\nC. 丙\nD. 丁\n答案： A\n\n"
    "问题dev1\nA. 甲1\nB. 乙\nC. 丙\nD. 丁\n答案： B\n\n"
    "问题test1\nA. 甲1\nB. 乙\nC. 丙\nD. 丁\n答案："
)
MMLU = (
    "The following are multiple choice questions (with answers) about high school physics.\n\n"
    "test 2?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
)


@pytest.mark.parametrize(
    ("name", "form", "shots", "answer", "context", "continuations"),
    [
        ("arc_easy", "cloze", 0, 1, "Question: Colour 1?\nAnswer:", (" red", " blue", " green")),
        ("cmmlu", "letter", 2, 1, CMMLU, (" A", " B", " C", " D")),
        ("mmlu", "letter", 0, 2, MMLU, (" A", " B", " C", " D")),
    ],
)
def test_the_prompt_is_that_of_lm_eval(
    data: Path, name: str, form: Form, shots: int, answer: int, context: str, continuations: tuple[str, ...]
) -> None:
    """Of the question with the number of its answer."""
    task = read(data, name)
    query = choice_queries(task, task.choice_items, form, shots)[answer]
    assert (query.context, query.continuations) == (context, continuations)
    assert task.choice_items[answer].answers == (answer,)


def test_the_last_word_of_lambada_is_scored_with_its_space(data: Path) -> None:
    scorer = FakeScorer(lambda context, continuation: 0.5 if "1" in context else 3.0)
    results = evaluate_task(scorer, read(data, "lambada"))
    assert scorer.pairs[0] == ("The 0 dogs bark at the", " moon")
    assert [result.is_right for result in results] == [False, True, False]
    assert results[0].nats == 3.0
    assert results[0].bytes == len(" moon")


def test_examples_come_from_the_file_itself_without_a_development_split(data: Path) -> None:
    task = read(data, "gsm8k").with_shots(5)
    assert len(task.items) == 3
    scorer = FakeScorer(lambda context, continuation: 1.0, lambda prompt: f" #### {prompt.count('Question:')}")
    evaluate_task(scorer, task, shots=5)
    assert scorer.prompts[0].startswith("Question: 0 + 1?\nAnswer: It is <<0+1=1>>1.\n#### 1\n\nQuestion: 1 + 1?")
    assert scorer.prompts[0].endswith("#### 5\n\nQuestion: 5 + 1?\nAnswer:")
    assert "Question:" in scorer.stops[0]
    with pytest.raises(UsageError, match="too few"):
        read(data, "gsm8k").with_shots(8)


def test_accuracy_is_at_chance_for_a_model_that_always_gives_the_same_letter() -> None:
    items = evaluate_task(always("B"), random_task(1500))
    result = summarize(BenchEvaluation("m", "t", "letter", 0, ORIGINAL, items))
    assert result.chance == 0.25
    assert result.accuracy.contains(0.25)
    assert result.centered_accuracy.contains(0.0)


def test_metrics_of_a_model_that_is_always_right_or_always_wrong() -> None:
    task = random_task(50)
    right = {item.question: " " + "ABCD"[item.answers[0]] for item in task.choice_items}

    def nats(context: str, continuation: str) -> float:
        return math.log(2) if continuation == right[context.splitlines()[0]] else 4.0

    good = summarize(BenchEvaluation("m", "t", "letter", 0, ORIGINAL, evaluate_task(FakeScorer(nats), task)))
    assert (good.accuracy.value, good.centered_accuracy.value) == (1.0, 1.0)
    assert good.accuracy.low < 0.95  # 50 items cannot show more
    assert good.answer_bits_per_byte is not None
    assert good.answer_bits_per_byte.value == pytest.approx(1 / 2)  # one bit, two bytes
    bad = FakeScorer(lambda context, continuation: -nats(context, continuation))
    wrong = summarize(BenchEvaluation("m", "t", "letter", 0, ORIGINAL, evaluate_task(bad, task)))
    assert wrong.centered_accuracy.value == pytest.approx(-1 / 3)


def test_log_likelihoods_of_options_are_divided_by_their_bytes() -> None:
    item = ChoiceItem("a", "Where?", ("in 北京", "up"), (0,))
    task = Task("t", "en", "cloze", 0, (item,), ())
    nats = {" in 北京": 4.0, " up": 1.5}
    (result,) = evaluate_task(FakeScorer(lambda context, continuation: nats[continuation]), task)
    assert not result.is_right
    assert result.is_right_per_byte  # 4.0 / 9 < 1.5 / 2
    assert (result.nats, result.bytes) == (4.0, 10)


def test_of_several_right_options_all_have_to_be_the_likeliest() -> None:
    item = ChoiceItem("a", "Which two?", ("w", "x", "y", "z"), (0, 2))
    assert item.chance == pytest.approx(1 / 6)
    task = Task("t", "en", "letter", 0, (item,), ())
    for nats, expected in (({" A": 1, " B": 3, " C": 2, " D": 4}, True), ({" A": 1, " B": 2, " C": 3, " D": 4}, False)):
        (result,) = evaluate_task(FakeScorer(lambda context, continuation, nats=nats: nats[continuation]), task)
        assert result.is_right is expected


def test_the_chain_of_thought_comes_before_the_letter() -> None:
    task = random_task(2)
    scorer = FakeScorer(lambda context, continuation: 1.0, lambda prompt: " Because.\n\n")
    evaluate_task(scorer, task, "cot")
    assert scorer.prompts[0].endswith("\nAnswer: Let's think step by step.")
    context, continuation = scorer.pairs[0]
    assert context == scorer.prompts[0] + " Because.\nTherefore, the answer is"
    assert continuation == " A"


def test_only_the_first_line_counts() -> None:
    item = AnswerItem("a", "Capital?", "Paris", "Paris", "first-line")
    assert first_line("\n\n Paris.\nLondon") == "Paris."
    assert is_right_answer(item, " paris.\n\nQuestion: and of England?")
    assert not is_right_answer(item, "London\nParis")
    assert not is_right_answer(item, "")
    assert not is_right_answer(item, "Paris, London, Rome")


def test_the_first_marked_number_counts() -> None:
    item = AnswerItem("a", "?", "1234", "", "number")
    assert is_right_answer(item, "So it is 1,234.\n#### 1,234.")
    assert not is_right_answer(item, "#### 5\n#### 1234")
    assert not is_right_answer(item, "1234")
    assert not is_right_answer(item, "#### ,.")


def test_a_solution_longer_than_the_context_has_no_bits(data: Path) -> None:
    scorer = FakeScorer(lambda context, continuation: 1.0, lambda prompt: "", limit=3)
    items = evaluate_task(scorer, read(data, "gsm8k"))
    result = summarize(BenchEvaluation("m", "gsm8k", "generate", 0, ORIGINAL, items))
    assert result.answer_bits_per_byte is None
    assert result.accuracy.value == 0
    assert result.accuracy.high > 0.1  # eight wrong answers prove little


def test_generated_code_runs_in_a_sandbox(data: Path) -> None:
    task = read(data, "humaneval")
    first, second = task.items
    assert isinstance(second, CodeItem)
    prompts = {"c": "def f(z):\n", "d": "def f(w):\n"}
    others = [replace(second, id=name, prompt=prompt) for name, prompt in prompts.items()]
    items = (first, replace(second, prompt="def f(y):\n"), *others)
    equal_to_all = "    class Equal:\n        __eq__ = lambda *both: True\n    return Equal()"  # not plain data
    texts = {"(x)": "    return x", "(y)": "    return 3", "(z)": "    raise SystemExit(0)", "(w)": equal_to_all}
    scorer = FakeScorer(lambda context, continuation: 1.0, lambda prompt: texts[prompt[5:8]])
    for backend in ("sandlock", "bubblewrap"):
        try:
            results = evaluate_task(scorer, replace(task, items=items), sandbox=Sandbox(backend))
        except (Z2aError, OSError):
            continue  # tests/sandbox say why
        assert [result.is_right for result in results] == [True, False, False, False]
        assert [result.is_unsupported for result in results] == [False, False, False, True]
        assert "\ndef" in scorer.stops[0]
        return
    pytest.skip("no sandbox works here")


def test_unknown_benchmarks_and_damaged_files_are_named(data: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'arc_easy'"):
        read(data, "arc")
    with pytest.raises(UsageError, match="has no files of arc_challenge"):
        read(data, "arc_challenge")
    (data / "arc_easy_test.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(Z2aError, match="line 1: no question, choices, answerKey"):
        read(data, "arc_easy")
    (data / "arc_easy_test.jsonl").write_text("{\n")
    with pytest.raises(Z2aError, match="line 1"):
        read(data, "arc_easy")
    (data / "gsm8k_test.jsonl").write_text("")
    with pytest.raises(UsageError, match="no items"):
        read(data, "gsm8k")


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    task = random_task(100)
    assert task.sample(10, 1) == task.sample(10, 1)
    assert task.sample(10, 1) != task.sample(10, 2)
    assert len({item.id for item in task.sample(10, 1).items}) == 10
    assert task.sample(500, 1) is task


def test_items_of_the_shared_corpus_are_read(shared_corpus: Path) -> None:
    tasks = list(read_tasks(shared_corpus / "eval", []))
    assert {task.name: len(task.items) for task in tasks} == {
        "arc_easy": 2376, "arc_challenge": 1172, "mmlu": 4352, "cmmlu": 3573, "agieval_sat-math": 220,
        "agieval_gaokao-biology": 210, "agieval_gaokao-geography": 199, "agieval_gaokao-history": 235,
        "agieval_gaokao-mathqa": 351, "gaokao_bench": 118, "lambada": 5153, "gsm8k": 1319, "humaneval": 164,
    }  # fmt: skip
    for item in (item for task in tasks for item in task.choice_items):
        assert 0 <= max(item.answers, default=-1) < len(item.options), item


def test_questions_that_share_a_text_are_split(tmp_path: Path) -> None:
    row = (
        '{"keywords": "geo", "example": [{"index": 0, "answer": ["B", "C"], "question": '
        '"某地多雨。据此完成 1～2 题。\\n1．该地是（ ） A．甲 B．乙 C．丙\\n地 D．丁\\n'
        '2．主要\\n作物是（ ）\\nA．稻 B．麦 C．茶 D．棉\\n"}]}'
    )
    (tmp_path / "gaokao_bench_geo.json").write_text(row, encoding="utf-8")
    first, second = read(tmp_path, "gaokao_bench").choice_items
    assert (first.question, first.options, first.answers) == ("该地是（ ）", ("甲", "乙", "丙地", "丁"), (1,))
    assert (second.question, second.answers) == ("主要作物是（ ）", (2,))
    assert first.passage == second.passage == "某地多雨。据此完成 1～2 题。"


def test_items_without_an_id_of_their_own_are_refused(data: Path) -> None:
    path = data / "arc_easy_test.jsonl"
    path.write_text(path.read_text() * 2)
    with pytest.raises(UsageError, match="same id"):
        read(data, "arc_easy")


def test_random_items_are_what_the_tests_expect() -> None:
    assert len({option for item in random_items(100) for option in item.options}) == 400
