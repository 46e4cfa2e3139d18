"""The code that a recipe names is listed, with its file, and by choice without running any of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.cli.main import app
from zero2all.recipe.imported_code import find_module

CODE = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()


def reward(prompt, answer, reference):
    return 1.0


class Sink:
    def __init__(self, directory): ...
    def step(self, step, values): ...
    def event(self, name, details): ...
    def sample(self, step, name, text): ...
    def histogram(self, step, name, counts, edges): ...
    def close(self): ...
"""
RECIPE = """
train:
  steps: 1
  init: null
  objective: {name: sft, grpo: {rewards: ["theirs.deep.scores:reward"]}}
track: {sinks: [tensorboard, "theirs_sink:Sink"]}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "theirs" / "deep").mkdir(parents=True)
    for name in ("theirs/__init__.py", "theirs/deep/__init__.py", "theirs/deep/scores.py", "theirs_sink.py"):
        (tmp_path / name).write_text(CODE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def check(recipe: Path, *words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["recipe", "check", str(recipe), "--json", *words])
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_what_a_recipe_imports_is_listed(package: Path) -> None:
    expected = [
        {
            "key": "train.objective.grpo.rewards.0",
            "name": "theirs.deep.scores:reward",
            "file": str(package / "theirs" / "deep" / "scores.py"),
        },
        {"key": "track.sinks.1", "name": "theirs_sink:Sink", "file": str(package / "theirs_sink.py")},
    ]
    assert check(package / "recipe.yaml", "--no-import")["imports"] == expected
    assert not list(package.rglob("*.ran")), "nothing has run, the packages around a module neither"
    assert check(package / "recipe.yaml")["imports"] == expected
    assert len(list(package.rglob("*.ran"))) == 4
    shown = CliRunner().invoke(app, ["recipe", "check", str(package / "recipe.yaml")]).output
    assert "it imports:" in shown
    assert "theirs_sink:Sink" in shown


def test_a_reward_that_cannot_be_imported_is_a_mistake_of_the_recipe(package: Path) -> None:
    (package / "broken.py").write_text("raise SystemExit('gone')")
    for name in ("broken:reward", "nowhere:reward", "theirs:nothing", "theirs:__name__"):
        words = [str(package / "recipe.yaml"), f'train.objective.grpo.rewards=["{name}"]']
        done = CliRunner().invoke(app, ["recipe", "check", *words])
        assert done.exit_code == 2, done.output
        assert "train.objective.grpo.rewards.0" in done.output
        assert "this is a bug" not in done.output


@pytest.mark.parametrize(
    "name", ["", ".", "os.path.x", "no_such_module", "theirs..deep", "json.no", "a" * 5000, "../x"]
)
def test_modules_that_are_not_there_are_not_found(name: str, package: Path) -> None:
    assert find_module(name) is None
