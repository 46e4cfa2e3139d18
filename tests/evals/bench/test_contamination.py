"""Items that are in training documents are found, and the others are evaluated by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.evals.bench.fakes import write_benchmarks
from zero2all.base.errors import UsageError
from zero2all.corpus import build_corpus
from zero2all.evals import EvalTarget
from zero2all.evals.bench import BenchOptions, run_bench
from zero2all.evals.bench.items import ChoiceItem, ClozeItem
from zero2all.evals.bench.memorization import find_contamination_of
from zero2all.evals.bench.tasks import Task
from zero2all.recipe import parse_recipe

LONG = "Which of the following planets of the solar system has the largest number of known moons in {}?"
CHINESE = "下列关于光合作用过程中暗反应阶段发生场所和产物的叙述正确的是第{}项"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contaminated")
    texts = [
        f"An exam that somebody copied. {LONG.format('1999').upper()} The answer is Saturn, as all pupils know.",
        f"练习题：{CHINESE.format('三')}。答案见下页。",
        "Moons are many, and planets are few, and nothing of this has to do with any exam at all, or so they say.",
    ]
    with open(root / "raw.jsonl", "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    sources = json.dumps([{"name": "web", "paths": [str(root / "raw.jsonl")]}])
    recipe = parse_recipe(TINY, [f"out={root}", f"corpus.sources={sources}", "corpus.holdout=0"])
    build_corpus(recipe.corpus, recipe.documents_dir)
    return recipe.documents_dir


def item(name: str, question: str) -> ChoiceItem:
    return ChoiceItem(name, question, ("Saturn", "Mars"), (0,))


def test_items_with_an_ngram_in_a_training_document_are_found(documents: Path) -> None:
    items = (
        item("copied", LONG.format("1999")),
        item("similar", "Which of the planets in our solar system has the highest count of moons that are known?"),
        item("short", "Which planet?"),
        item("zh copied", CHINESE.format("三")),
        item("zh other", "下列关于呼吸作用过程中有氧阶段发生场所和产物的叙述错误的是哪一项"),
    )
    other = (
        ClozeItem("copied", "Moons are many, and planets are few, and nothing of this has to do with any", " exam"),
    )
    first, second = find_contamination_of(
        [Task("one", "en", "letter", 0, items, ()), Task("two", "en", None, None, other, ())], documents
    )
    assert first.shares == {
        "copied": pytest.approx(1.0, abs=0.3),
        "similar": 0,
        "zh copied": pytest.approx(1.0),
        "zh other": 0,
    }
    assert (first.found, first.too_short, first.items) == (2, 1, 5)
    assert [one.id for one in items if first.is_clean(one.id)] == ["similar", "short", "zh other"]
    assert second.found == 1  # of the same name as an item of the first task


def test_the_training_documents_of_others_are_unknown(tmp_path: Path) -> None:
    target = EvalTarget(None, None, "theirs", None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="training documents of theirs are unknown"):
        run_bench([target], write_benchmarks(tmp_path), (), BenchOptions(contamination=True))
