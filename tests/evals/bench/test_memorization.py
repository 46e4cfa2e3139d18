"""A model that was trained on a benchmark is told from one that was not: by mutations and by question training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero2all.corpus import build_corpus
from zero2all.evals import open_target
from zero2all.evals.bench import BenchOptions, BenchReport, BenchResult, Difference, run_bench
from zero2all.evals.bench.evaluate import choice_queries
from zero2all.evals.bench.memorization import CLEAN, refers_to_options
from zero2all.evals.bench.report import ORIGINAL
from zero2all.evals.bench.run import QUESTION_TRAINED
from zero2all.evals.bench.tasks import Task, read_tasks
from zero2all.recipe import parse_recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens
from zero2all.train import train

ITEMS = 300
RECIPE = """
name: memorize
seed: 3
corpus: {holdout: 0, filters: [], dedup: {near: false}}
tokenizer: {vocab_size: 2048, min_frequency: 1}
model: {hidden_size: 128, intermediate_size: 384, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
  max_position_embeddings: 256}
train: {steps: 420, seq_len: 256, document_mask: true, batch_tokens: 2048, precision: fp32, device: cpu,
  optimizer: {lr: 4e-3}}
checkpoint: {flash_every: null}
"""


def write_items(path: Path, lines: list[str]) -> Path:
    path.mkdir()
    (path / "arc_easy_test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return path


def train_on(task: Task, out: Path) -> Path:
    """A run that has read the questions with their answers, dozens of times."""
    out.mkdir()
    queries = choice_queries(task, task.choice_items, "letter", shots=0)
    with open(out / "raw.jsonl", "w", encoding="utf-8") as stream:
        for item, query in zip(task.choice_items, queries, strict=True):
            stream.write(json.dumps({"text": query.context + query.continuations[item.answers[0]]}) + "\n")
    sources = json.dumps([{"name": "exam", "paths": [str(out / "raw.jsonl")]}])
    recipe = parse_recipe(RECIPE, [f"out={out}", f"corpus.sources={sources}"])
    build_corpus(recipe.corpus, recipe.documents_dir)
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    train(recipe)
    return recipe.run_dir


def result(report: BenchReport, version: str) -> BenchResult:
    return next(one for one in report.results if one.mutation == version)


def gap(report: BenchReport, version: str) -> Difference:
    return next(one for one in report.differences if one.mutation == version)


@pytest.mark.long
def test_a_memorized_benchmark_is_told_from_one_that_is_new(shared_corpus: Path, tmp_path: Path) -> None:
    lines = (shared_corpus / "eval" / "arc_easy_test.jsonl").read_text("utf-8").splitlines()
    (every,) = read_tasks(shared_corpus / "eval", ["arc_easy"])
    usable = [
        line
        for line, item in zip(lines, every.choice_items, strict=True)
        if len(item.options) == 4 and not refers_to_options(item) and len(line) < 450
    ]
    seen, other = usable[:ITEMS], usable[ITEMS : 2 * ITEMS]
    data = write_items(tmp_path / "seen", seen)
    options = BenchOptions(("letter",), mutate=True, train_on_questions=True, contamination=True)
    reports = {}
    for name, folder in (("memorized", data), ("clean", write_items(tmp_path / "other", other))):
        (task,) = read_tasks(folder, ["arc_easy"])
        run = train_on(task, tmp_path / name)
        reports[name] = run_bench([open_target(str(run))], data, ["arc_easy"], options)
    memorized, clean = reports["memorized"], reports["clean"]
    accuracy = result(memorized, ORIGINAL).accuracy.value
    assert accuracy >= 0.9
    versions = ("permuted", "labels-chinese", "labels-roman")
    gaps = {name: 100 * (result(memorized, name).accuracy.value - accuracy) for name in versions}
    assert min(gaps.values()) <= -30, gaps
    assert result(clean, ORIGINAL).centered_accuracy.contains(0)
    assert all(gap(clean, name).difference.contains(0) for name in versions)
    assert result(memorized, QUESTION_TRAINED).accuracy.low > result(clean, QUESTION_TRAINED).accuracy.high
    assert gap(clean, QUESTION_TRAINED).difference.contains(0)
    assert memorized.contamination[0].found > 0.9 * (ITEMS - memorized.contamination[0].too_short)
    assert clean.contamination[0].found < 0.1 * ITEMS
    assert all(one.mutation != CLEAN or one.items < ITEMS for one in memorized.results)
