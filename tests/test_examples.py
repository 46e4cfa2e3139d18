"""The examples do what their README says: its commands are run as printed, from an empty directory."""

from __future__ import annotations

import ast
import csv
import math
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.processes import MARK, gone
from zero2all.recipe import load_recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import DocumentSpan, TokenStore
from zero2all.train.plan import Plan

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
NAMES = sorted(re.findall(r"^## (\w+\.py)$", README, re.MULTILINE))


def blocks(page: str, name: str, language: str) -> list[str]:
    """The code blocks of a language in the section of an example."""
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def commands(name: str) -> list[str]:
    return "".join(blocks(README, name, "sh")).splitlines()


def run(command: str, directory: Path) -> str:
    """Run a command of the README as at the top of a checkout; returns its stdout. No process may be left."""
    if not (directory / "examples").exists():
        (directory / "examples").symlink_to(EXAMPLES)
    mark = uuid.uuid4().hex
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={**os.environ, "PATH": path, MARK: mark},
        capture_output=True,
        text=True,
        timeout=200,
    )
    gone(mark)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_example_has_a_section_with_the_command_of_its_docstring() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "tiny_run.py") == NAMES
    for name in NAMES:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or ""
        assert f"    {commands(name)[0]}" in docstring.splitlines(), name


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_blocks(name: str) -> None:
    chinese = (EXAMPLES / "README.zh-CN.md").read_text(encoding="utf-8")
    for language in ("sh", "text"):
        assert blocks(README, name, language) == blocks(chinese, name, language)


def test_an_example_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    command = [sys.executable, EXAMPLES / "custom_filter.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "not an empty directory" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_custom_filter_works_in_this_process_and_in_workers(tmp_path: Path) -> None:
    one_process, workers = (run(command, tmp_path) for command in commands("custom_filter.py"))
    [printed] = blocks(README, "custom_filter.py", "text")
    assert one_process == workers == printed


@pytest.mark.long
def test_a_custom_sink_gets_every_metric_from_python_and_from_the_command_line(tmp_path: Path) -> None:
    first, second = commands("custom_sink.py")
    printed = run(first, tmp_path)
    path = tmp_path / "runs" / "examples" / "sink" / "run" / "metrics.csv"
    rows = list(csv.reader(path.open(newline="", encoding="utf-8")))
    last = [",".join(row) for row in rows if row[0] == "19"]
    assert printed.splitlines() == [f"{len(rows)} rows in {path}; the last step:", *last]
    assert {"19,loss", "19,loss/en", "19,loss/zh", "19,grad_norm"} <= {row.rpartition(",")[0] for row in last}

    run(second, tmp_path)
    losses = [(int(step), float(value)) for step, name, value in csv.reader(path.open()) if name == "loss"]
    assert [step for step, _ in losses] == list(range(40))
    assert losses[-1][1] < losses[0][1] - 1


@pytest.mark.slow
def test_the_token_store_and_the_batch_of_a_step_are_those_of_training(tmp_path: Path) -> None:
    [command] = commands("read_token_store.py")
    printed = run(command, tmp_path)
    recipe = load_recipe(tmp_path / "runs" / "examples" / "tokens" / "recipe.yaml")
    store = TokenStore(recipe.tokens_dir, "train")
    for name in ("en", "zh"):
        [shard] = store.sources[name]
        assert f"source {name}: {len(shard.document_offsets) - 1} documents, {len(shard.tokens)} tokens" in printed
    assert "Emma walked to the market and bought 592 apples." in printed

    step = int(command.rpartition("--step ")[2])
    stage = Plan(recipe, store).stages[0]  # what the trainer follows
    spans = stage.dataset.documents(*stage.sample_range(step))
    tokenizer = Tokenizer(recipe.tokenizer_dir)
    expected = [
        f"  sample {span.sample} {span.source} {span.gid} {span.title!r}: {span.tokens} tokens, {text[:40]!r}"
        for span in spans
        for text in [tokenizer.decode(span_tokens(store, span))]
    ]
    assert [line for line in printed.splitlines() if line.startswith("  sample ")] == expected
    assert len(expected) >= 8


def span_tokens(store: TokenStore, span: DocumentSpan) -> list[int]:
    """From the shard, not through the sample order."""
    [shard] = [shard for shard in store.sources[span.source] if shard.stem.name == span.shard]
    start = int(shard.document_offsets[span.document]) + span.first_token
    return shard.read(start, start + span.tokens).tolist()


@pytest.mark.long
def test_a_run_resumed_on_two_ranks_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    [command] = commands("resume_on_other_ranks.py")
    lines = run(command, tmp_path).splitlines()
    rows = {int(step): values for step, *values in (line.split() for line in lines[1:-1])}
    assert [(step, int(ranks)) for step, (ranks, *_) in rows.items()] == [(0, 1), (19, 1), (20, 2), (39, 2)]
    for step, (_, uninterrupted, resumed, _) in rows.items():
        assert float(uninterrupted) == pytest.approx(float(resumed), abs=6e-6), step
    assert float(rows[0][1]) == pytest.approx(math.log(512), abs=0.3)  # an untrained model of 512 tokens
    assert float(rows[39][1]) < float(rows[19][1]) < float(rows[0][1])
    before, after, tolerance = map(float, re.findall(r"\d\.?\d*e-?\+?\d+", lines[-1]))
    assert before == 0
    assert after <= tolerance == 5e-6
