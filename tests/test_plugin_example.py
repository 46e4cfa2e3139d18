"""``examples/plugin``: built as a wheel and installed, then all nine plugins in one run, on one rank and on two."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from zero2all.base.errors import RecipeError, Z2aError
from zero2all.base.plugins import KINDS, find_plugin, installed
from zero2all.cli.main import app
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe
from zero2all.recipe.named_plugins import plugin_mistakes
from zero2all.tokens import build_tokens
from zero2all.track import read_steps
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.hyperparameters import lr_parameters, step_law_lr

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
MAX_LINES = 250
OPTIONS = [
    "corpus.dir=null", "tokens.dir=null", "corpus.filters=[normalize, {name: shouting, max_share: 0.6}]",
    "train.optimizer={name: signum, options: {beta: 0.8}}",
    "train.schedule={shape: halving, warmup: 1, options: {times: 2}}",
    "train.objective={name: capped, options: {cap: 8}, grpo: {rewards: [{name: digits, points: 10}]}}",
    "train.callbacks=[{name: text-reward, every: 1}]", "track.sinks=[{name: csv, digits: 3}]",
    "evals.benchmarks=[{name: sums, largest: 3}]", "train.steps=6", "checkpoint.every=2 steps",
]  # fmt: skip
LAYOUTS = {"FSDP": [], "TP": ["parallel.tp=2", "parallel.dp_shard=1"]}
NAMES = {
    "reader": "question-lines", "filter": "shouting", "optimizer": "signum", "schedule": "halving",
    "objective": "capped", "reward": "digits", "callback": "text-reward", "task": "sums", "sink": "csv",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The wheel, unpacked as an installer would, on the path of this process and of its children."""
    directory = tmp_path_factory.mktemp("example")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(words, cwd=EXAMPLE, check=True, capture_output=True, timeout=120)
    [wheel] = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory / "site"))
        installed.cache_clear()
        yield directory / "site"
    installed.cache_clear()


@pytest.fixture(scope="module")
def built(site: Path, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents and tokens that the reader and the filter made."""
    out = tmp_path_factory.mktemp("built")
    lines = [f"What is {n} and {n}? It is {2 * n}, as every child in year {n % 7} can tell." for n in range(900)]
    (out / "a.qa").write_text("\n".join([*lines, "WHO? ME AND NOBODY ELSE, SAYS EVERY SHOUTING LINE OF THIS FILE"]))
    recipe = recipe_in(workspace, out, out)
    corpus = build_corpus(recipe.corpus, recipe.documents_dir)
    assert sum(one.documents for one in corpus.sources["qa"].dropped.values()) == 1
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return out


def recipe_in(workspace: Path, built: Path, out: Path, *overrides: str) -> Recipe:
    source = {"name": "qa", "paths": [f"{built}/a.qa"], "reader": {"name": "question-lines", "separator": "?"}}
    dirs = [f"corpus.dir={built}/documents", f"tokens.dir={built}/tokens"]
    words = [*OPTIONS, *dirs, f"corpus.sources={json.dumps([source])}", f"out={out}", *overrides]
    return tiny_recipe(workspace, *words)


def losses(out: Path) -> list[float]:
    return [values["loss"] for values in read_steps(out / "run" / "record.jsonl").values()]


def train_and_die(recipe: Recipe, site: Path, step: int) -> None:
    sys.path.insert(0, str(site))  # a process of a pool that was there before the example
    installed.cache_clear()
    train(recipe, TrainerHooks(on_batch=lambda batch: os.kill(os.getpid(), 9) if batch.step == step else None))


def train_on_rank(recipe: Recipe, site: Path) -> int:
    sys.path.insert(0, str(site))
    installed.cache_clear()
    return train(recipe).resumed_at


def test_the_example_is_short_and_its_own_tests_pass(site: Path) -> None:
    files = [EXAMPLE / "pyproject.toml", *EXAMPLE.rglob("*.py")]
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= MAX_LINES
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(words, env=environment, cwd=site, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout


def test_all_nine_are_listed_with_their_distribution(site: Path) -> None:
    done = CliRunner().invoke(app, ["plugins", "--json"])
    listed = [one for one in json.loads(done.stdout)["plugins"] if one["distribution"] == "z2a-example"]
    assert {one["kind"]: one["name"] for one in listed} == NAMES
    assert set(NAMES) == set(KINDS)
    assert {one["version"] for one in listed} == {"0.1.0"}
    assert "z2a-example 0.1.0" in CliRunner().invoke(app, ["plugins"]).stdout


def test_one_run_uses_all_nine_and_resumes_bit_by_bit_after_a_kill(
    site: Path, workspace: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_in(workspace, built, tmp_path / "a")
    assert list(plugin_mistakes(recipe)) == []
    train(recipe)
    run = Run.open(tmp_path / "a")
    steps, peak = read_steps(run.record_path), run.recipe.train.optimizer.peak_lr
    assert peak == pytest.approx(step_law_lr(lr_parameters(run.load_model().config), 6 * 256) / 10, rel=0.01)
    assert [step["lr"] / peak for step in steps.values()][-1] == 0.25, "the schedule"
    assert all("reward/text" in step for step in steps.values()), "the callback, with the reward function"
    assert "loss" in (run.directory / "metrics.csv").read_text(), "the sink"
    done = CliRunner().invoke(app, ["eval", "bench", str(tmp_path / "a"), "--data", str(tmp_path), "--json"])
    assert {result["task"] for result in json.loads(done.stdout)["results"]} == {"sums"}
    versions = json.loads((run.directory / "environment.json").read_text())["plugins"]
    assert versions["optimizer signum"] == "z2a-example 0.1.0"

    again = recipe_in(workspace, built, tmp_path / "b")
    child = multiprocessing.get_context("spawn").Process(target=train_and_die, args=(again, site, 4))
    child.start()
    child.join(200)
    assert child.exitcode == -signal.SIGKILL
    path = tmp_path / "b" / "run" / "environment.json"
    path.write_text(path.read_text().replace("z2a-example 0.1.0", "z2a-example 0.0.9"))
    capsys.readouterr()
    assert train(again).resumed_at in (2, 4)
    warning = "the optimizer signum is of z2a-example 0.1.0, and the run was trained with z2a-example 0.0.9"
    assert warning in capsys.readouterr().err
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    weights = run.load_model().state_dict()
    for key, tensor in Run.open(tmp_path / "b").load_model().state_dict().items():
        assert torch.equal(tensor, weights[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one_and_resume_bit_by_bit(
    layout: str, site: Path, workspace: Path, built: Path, tmp_path: Path
) -> None:
    def recipe(name: str, *overrides: str) -> Recipe:
        return recipe_in(workspace, built, tmp_path / name, "train.precision=fp32", *overrides)

    train(recipe("one"))
    parallel = LAYOUTS[layout]
    on_ranks(2, train_on_rank, recipe("two", *parallel), site)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)
    with pytest.raises(Z2aError):
        on_ranks(2, train_and_die, recipe("three", *parallel), site, 4)
    assert on_ranks(2, train_on_rank, recipe("three", *parallel), site)[0] in (2, 4)
    assert losses(tmp_path / "three") == losses(tmp_path / "two")


def test_an_unsupported_layout_names_plugin_and_feature(workspace: Path, built: Path, tmp_path: Path) -> None:
    find_plugin("optimizer", "signum")
    message = "optimizer signum of z2a-example 0.1.0 does not support pipeline_parallel, which parallel.pp=2 needs"
    with pytest.raises(RecipeError, match=message):
        recipe_in(workspace, built, tmp_path, "parallel.pp=2")


def test_an_exception_in_training_names_the_plugin(
    workspace: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(workspace, built, tmp_path)
    find_plugin("objective", "capped")
    monkeypatch.setattr("z2a_example.training.Capped.loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        train(recipe)
    assert caught.value.__notes__ == ["raised by the objective capped of z2a-example 0.1.0"]
