"""Confidence intervals cover what they should, and the command prints and returns everything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.evals.bench.fakes import FakeScorer, write_benchmarks
from zero2all.base.errors import UsageError
from zero2all.base.records import to_json
from zero2all.evals import EvalTarget
from zero2all.evals.bench import BenchOptions, format_report, run_bench
from zero2all.evals.bench.evaluate import ItemResult
from zero2all.evals.bench.report import (
    ORIGINAL,
    BenchEvaluation,
    compare,
    mean_of_ratios,
    paired_difference,
    proportion,
    ratio,
)
from zero2all.sandbox import open_sandbox


def test_intervals_cover_the_true_share_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    for share in (0.02, 0.25, 0.9):
        covered = [proportion(rng.random(80) < share).contains(share) for _ in range(400)]
        assert np.mean(covered) > 0.92
    nothing = proportion(np.zeros(20))
    assert (nothing.value, nothing.low) == (0, 0)
    assert 0.1 < nothing.high < 0.25


def test_the_interval_of_a_ratio_covers_it() -> None:
    rng = np.random.default_rng(4)
    covered = []
    for _ in range(60):
        sizes = rng.integers(1, 20, 60).astype(float)
        estimate = ratio(sizes * 2 + rng.normal(0, 1, 60), sizes)
        assert estimate is not None
        covered.append(estimate.contains(2.0))
    assert np.mean(covered) > 0.85
    assert ratio(np.ones(3), np.zeros(3)) is None


def test_pairing_finds_a_difference_that_separate_intervals_hide() -> None:
    rng = np.random.default_rng(5)
    difficulty = rng.random(400)
    first, second = difficulty < 0.5, difficulty < 0.54
    ones = np.ones(400)
    found = paired_difference((first, ones), (second, ones))
    assert found is not None
    assert found.low > 0
    assert proportion(first).high > proportion(second).low  # each by itself says nothing
    same = paired_difference((first, ones), (first, ones))
    assert same is not None
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_the_mean_over_tasks_weighs_tasks_equally() -> None:
    ones = np.ones(10)
    estimate = mean_of_ratios([(np.ones(10), ones), (np.zeros(1000), np.ones(1000))])
    assert estimate.value == 0.5


def test_only_items_of_both_evaluations_are_compared() -> None:
    def evaluation(ids: str, is_right: bool) -> BenchEvaluation:
        return BenchEvaluation("m", "t", "letter", 0, ORIGINAL, [ItemResult(one, is_right, 0.25) for one in ids])

    (difference,) = compare(evaluation("abc", True), evaluation("bcd", False), ("x", "y"), ("accuracy",))
    assert (difference.items, difference.difference.value) == (2, -1.0)
    assert compare(evaluation("a", True), evaluation("b", True), ("x", "y"), ("accuracy",)) == []


def fake_target(name: str, step: int | None = None) -> EvalTarget:
    return EvalTarget(None, None, name, step, Path())  # type: ignore[arg-type]


def scorer_of(target: EvalTarget) -> FakeScorer:
    wanted = " A" if target.name == "a" else " B"
    return FakeScorer(lambda context, continuation: 0.5 if continuation == wanted else 2.0)


def test_the_report_has_results_differences_and_an_aggregate(tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    options = BenchOptions(forms=("letter", "cloze"), shots=1)
    targets = [fake_target("a"), fake_target("b", 400)]
    report = run_bench(targets, data, ["arc_easy", "mmlu", "lambada"], options, scorer_of)
    rows = [(one.target, one.task, one.form, one.shots) for one in report.results]
    assert rows[:5] == [
        ("a", "arc_easy", "letter", 1),
        ("a", "arc_easy", "cloze", 1),
        ("a", "mmlu", "letter", 1),
        ("a", "mmlu", "cloze", 1),
        ("a", "lambada", "generate", 0),
    ]
    assert rows[5][0] == "b step 400"
    accuracy = {(one.target, one.task): one.accuracy.value for one in report.results if one.form == "letter"}
    assert accuracy == {
        ("a", "arc_easy"): 0.0, ("b step 400", "arc_easy"): 1.0, ("a", "mmlu"): 0.25, ("b step 400", "mmlu"): 0.25,
    }  # fmt: skip
    found = {
        (one.task, one.form, one.first, one.second, one.metric): one.difference.value for one in report.differences
    }
    assert found["arc_easy", "letter", "a", "b step 400", "accuracy"] == 1.0
    assert found["arc_easy", "letter", "a", "b step 400", "answer_bits_per_byte"] < 0
    assert ("mmlu", "cloze", "letter", "cloze", "accuracy") in found
    # letter: (1 - 1/3) / (1 - 1/3) = 1, 0; lambada 0
    assert report.core["b step 400"].value == pytest.approx((1 + 0 + 0) / 3)
    assert report.notes == ["a may have been trained on these questions: --mutate shows signs of it"]
    text = format_report(report)
    assert "b step 400: arc_easy  letter, 1-shot  original" in text
    assert "mean of centered accuracies, b step 400: 0.333" in text
    assert json.loads(json.dumps(to_json(report)))["results"][0]["accuracy"]["value"] == 0.0


def test_answers_that_were_not_tested_are_named_and_not_right(tmp_path: Path) -> None:
    try:
        open_sandbox()
    except UsageError as error:
        pytest.skip(str(error))
    scorer = FakeScorer(lambda context, continuation: 1.0, lambda prompt: "    return lambda: x")
    report = run_bench([fake_target("a")], write_benchmarks(tmp_path), ["humaneval"], BenchOptions(), lambda _: scorer)
    assert [one.accuracy.value for one in report.results] == [0.0]
    [said] = [note for note in report.notes if "not tested" in note]
    assert said.startswith("a: humaneval: 2 answers were not tested and count as wrong")
    assert said.endswith(": HumanEval/0, HumanEval/1")


def test_mutations_are_compared_with_the_original(tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    report = run_bench([fake_target("a")], data, ["cmmlu", "lambada"], BenchOptions(mutate=True), scorer_of)
    versions = [one.mutation for one in report.results if one.task == "cmmlu"]
    assert versions == [
        "original", "permuted", "labels-chinese", "labels-roman", "labels-none", "none-of-the-others", "generative",
        "stem-removed", "stem-swapped",
    ]  # fmt: skip
    assert [one.second for one in report.differences] == versions[1:]
    assert all((one.first, one.metric) == ("original", "centered_accuracy") for one in report.differences)
    assert "original  permuted" in format_report(report)
    cloze = run_bench([fake_target("a")], data, ["cmmlu"], BenchOptions(("cloze",), mutate=True), scorer_of)
    assert "permuted" not in {one.mutation for one in cloze.results}


def test_all_benchmarks_of_a_directory_are_asked_by_default(tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    (data / "HumanEval.jsonl").unlink()
    report = run_bench([fake_target("a")], data, make_scorer=scorer_of)
    assert [one.task for one in report.results] == ["arc_easy", "mmlu", "cmmlu", "lambada", "gsm8k"]
    assert len(report.core) == 1
    with pytest.raises(UsageError, match="has no files"):
        run_bench([fake_target("a")], tmp_path / "none", ["mmlu"], make_scorer=scorer_of)
