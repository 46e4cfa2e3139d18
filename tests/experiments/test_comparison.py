"""Comparison of runs that exist, through the command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.io import write_record
from zero2all.cli.main import app
from zero2all.corpus import build_corpus
from zero2all.evals import evaluate_bpb
from zero2all.experiments import build_report, compare_targets, evaluate
from zero2all.experiments.evaluate import EVALUATION_FILE
from zero2all.tokens import build_tokens
from zero2all.train import Run, train

pytestmark = pytest.mark.slow  # it trains five runs


def z2a(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def compare(*words: object) -> Any:
    done = z2a("compare", "--json", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a recipe, and two of it with an eighth of the learning rate."""
    out = tmp_path_factory.mktemp("runs")
    for name, lr in (("fast", "4e-3"), ("slow", "5e-4")):
        for seed in (1, 2):
            options = [f"train.optimizer.lr={lr}", f"seed={seed}", f"run={name}-{seed}", "train.steps=16"]
            options += ["evals.every=8 steps", "evals.tokens=1024"]
            train(tiny_recipe(workspace, f"out={out}", *options), evaluate=evaluate_bpb)
    return out


def test_two_seeds_are_one_group_and_a_lower_rate_is_a_difference_beyond_their_noise(runs: Path) -> None:
    found = compare(runs / "fast-1", runs / "slow-1", runs / "fast-2", runs / "slow-2")
    assert [(group["group"], group["seeds"]) for group in found["experiment"]["groups"]] == [
        ("fast-1", [1, 2]),
        ("slow-1", [1, 2]),
    ]
    assert found["differences"] == {"train.optimizer.lr": {"fast-1": 0.004, "slow-1": 0.0005}}
    [verdict] = found["experiment"]["verdicts"]
    assert verdict["difference"] > verdict["margin"] > 0
    assert found["verdicts"][0].startswith("fast-1 is better than slow-1 by ")
    group = found["experiment"]["groups"][0]
    assert (group["steps"], group["tokens"]) == (16, 16 * 256)
    assert group["tokens_per_second"] > 0
    assert group["seconds"] > 0
    assert found["remarks"] == []


def test_the_metrics_are_those_of_eval_loss(runs: Path) -> None:
    found = compare(runs / "fast-1", runs / "fast-2")
    [variant, _] = found["experiment"]["variants"]
    measured = json.loads(z2a("eval", "loss", runs / "fast-1", "--json").stdout)
    assert variant["result"]["metrics"]["bits_per_byte"] == measured["bits_per_byte"]
    assert variant["result"]["metrics"]["bits_per_byte/zh"] == measured["sources"]["zh"]["bits_per_byte"]
    assert variant["result"]["best_bits_per_byte"] <= measured["bits_per_byte"]
    assert found["verdicts"] == []  # one group


def test_one_seed_each_names_the_command_that_measures_the_noise(runs: Path) -> None:
    done = z2a("compare", runs / "fast-1", runs / "slow-1")
    assert done.exit_code == 0, done.output
    assert "fast-1 is better than slow-1 by" in done.output
    command = f"z2a compare {runs}/fast-1/recipe.yaml {runs}/slow-1/recipe.yaml --seeds 3"
    assert f"the noise between seeds is unknown; this measures it: {command}" in done.output
    assert "train.optimizer.lr   0.004  0.0005" in done.output.replace("\x1b", "")
    assert any(0x2800 < ord(character) <= 0x28FF for character in done.output), "the plot"


def test_runs_on_other_validation_text_are_not_comparable(runs: Path, workspace: Path, tmp_path: Path) -> None:
    other = tiny_recipe(workspace, f"corpus.dir={tmp_path}/documents", f"tokens.dir={tmp_path}/tokens",
                        "corpus.holdout=0.4", f"out={tmp_path}", "train.steps=2")  # fmt: skip
    build_corpus(other.corpus, other.documents_dir)
    build_tokens(other.tokens, other.documents_dir, other.tokenizer_dir, other.tokens_dir)
    train(other)
    found = compare(runs / "fast-1", tmp_path)
    assert found["verdicts"] == []
    assert "different validation sets, so their bits per byte are not comparable" in found["remarks"][0]
    assert any("different numbers of tokens" in remark for remark in found["remarks"])


def test_a_run_without_checkpoint_or_validation_text_is_shown_with_the_reason(runs: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "run"
    shutil.copytree(runs / "slow-2", broken)
    shutil.rmtree(broken / "checkpoints")
    found = compare(runs / "slow-1", broken)
    assert found["experiment"]["groups"][0]["seeds"] == [1]
    assert "no valid checkpoint" in found["experiment"]["groups"][0]["problems"][0]


def test_an_evaluation_that_was_saved_is_used_while_it_is_of_the_newest_checkpoint(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs / "fast-1", copy / "run")
    text = (copy / "run" / "recipe.yaml").read_text(encoding="utf-8").replace("run: fast-1", "run: run")
    (copy / "run" / "recipe.yaml").write_text(text, encoding="utf-8")
    run = Run.open(copy)
    evaluation = evaluate.evaluate(run)
    fake = json.loads(json.dumps(vars(evaluation))) | {"metrics": {"bits_per_byte": 0.5}}
    write_record(run.directory / EVALUATION_FILE, evaluate.CheckpointEvaluation(**fake))
    assert compare_targets([copy]).record.variants[0].bits_per_byte({}) == 0.5
    write_record(run.directory / EVALUATION_FILE, evaluate.CheckpointEvaluation(**(fake | {"step": 3})))
    assert compare_targets([copy]).record.variants[0].bits_per_byte({}) == evaluation.metrics["bits_per_byte"]


def test_pictures(runs: Path, tmp_path: Path) -> None:
    done = z2a("compare", runs / "fast-1", runs / "slow-1", "--svg", tmp_path / "a.svg")
    assert done.exit_code == 0, done.output
    svg = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert svg.count("<polyline") == 2
    assert "validation bits per byte" in svg


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{runs}/fast-1", "--seeds", "2"], "are for recipes"),
        (["{runs}/fast-1", "train.steps=3"], "are for recipes"),
        (["{runs}/fast-1", "{runs}/fast-1/recipe.yaml"], "either run directories or recipes"),
        (["{runs}/nowhere"], "nothing at"),
        (["a=b"], "give run directories or recipes"),
    ],
)
def test_what_is_refused(runs: Path, words: list[str], message: str) -> None:
    done = z2a("compare", *(word.format(runs=runs) for word in words))
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_a_directory_with_several_runs_is_all_of_them(runs: Path) -> None:
    report = build_report(compare_targets([runs]))
    assert sorted(group.group for group in report.experiment.groups) == ["fast-1", "slow-1"]
    assert os.path.samefile(report.directories["fast-1"], runs / "fast-1")
