"""A run directory with a damaged file: every command prints one line that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.base.io import sha256_file
from zero2all.cli.main import app
from zero2all.recipe import Recipe
from zero2all.train import train

STEP = "checkpoints/step-00000002"
READERS = [
    ["chat", "RUN", "--prompt", "a", "max_tokens=2"],
    ["blame", "RUN", "--step", "1"],
    ["ckpt", "ls", "RUN"],
    ["ckpt", "verify", "RUN"],
    ["watch", "RUN", "--once"],
]


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('damaged')}", "train.steps=2")
    train(recipe)
    return recipe


@pytest.fixture
def run(trained: Recipe, tmp_path: Path) -> Path:
    shutil.copytree(trained.run_dir, tmp_path / "out" / "run")
    return tmp_path / "out" / "run"


def z2a(arguments: list[str], run: Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*(word.replace("RUN", str(run)) for word in arguments), "--json"])
    return done.exit_code, json.loads(done.stdout).get("error", ""), done.stderr


def update_checksums(step: Path) -> None:
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"] = {name: sha256_file(step / name) for name in manifest["files"]}
    (step / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, list[str]] = {
    "identity.json": ["{}", "[]", "", '{"stages": 3, "model": 4}', '{"model": {"hidden_size": "x"}}'],
    "recipe.yaml": ["", "[1]", "model: [", "model: {hidden_size: -1}", "\x00"],
    f"{STEP}/state.json": ["{}", "[]", "null", '{"rope": 3}', '{"rope": {"rope_theta": "x"}}', "{"],
    f"{STEP}/manifest.json": ["{}", "[]", '{"kind": "checkpoint", "key": "2"}'],
}
CASES = [(name, text) for name, texts in DAMAGES.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_every_command_names_the_damaged_file(name: str, text: str, run: Path) -> None:
    (run / name).write_text(text, encoding="utf-8")
    if name.endswith("state.json"):
        update_checksums(run / STEP)
    errors = 0
    for words in READERS:
        code, error, stderr = z2a(words, run)
        assert "Traceback" not in stderr, (words, stderr)
        assert "bug" not in error, words
        if code:
            assert Path(name).name in error or STEP in error or STEP in stderr, (words, error)
            errors += 1
    assert errors


def test_training_needs_its_state_and_writes_its_identity_again(run: Path, workspace: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={run.parent}", "train.steps=3")
    identity = (run / "identity.json").read_text(encoding="utf-8")
    (run / "identity.json").write_text("{}", encoding="utf-8")
    state = (run / STEP / "state.json").read_text(encoding="utf-8")
    (run / STEP / "state.json").write_text("{}", encoding="utf-8")
    update_checksums(run / STEP)
    with pytest.raises(Z2aError, match="stages: Field required"):
        train(recipe)
    (run / STEP / "state.json").write_text(state, encoding="utf-8")
    update_checksums(run / STEP)
    train(recipe)
    assert set(json.loads((run / "identity.json").read_text())) == set(json.loads(identity))
