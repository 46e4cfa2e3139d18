"""Flags of commands: each changes what the command does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.cli.main import app
from zero2all.corpus.filters.quality_classifier import load_quality_model
from zero2all.recipe import recipe_yaml
from zero2all.train import train


def z2a(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('flags')}", "train.steps=4")
    train(recipe)
    return recipe.run_dir


def test_export_in_bf16(run: Path, tmp_path: Path) -> None:
    dtypes = {}
    for name, flags in (("fp32", []), ("bf16", ["--bf16"])):
        done = z2a("export", run, "--to", tmp_path / name, *flags)
        assert done.exit_code == 0, done.output
        weights = load_file(tmp_path / name / "model.safetensors")
        dtypes[name] = {weight.dtype for weight in weights.values()}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == {
            "fp32": "float32", "bf16": "bfloat16",
        }[name]  # fmt: skip
    assert dtypes == {"fp32": {torch.float32}, "bf16": {torch.bfloat16}}


def test_watch_in_the_terminal_ends_with_the_run(run: Path) -> None:
    done = z2a("watch", "--tty", run)
    assert done.exit_code == 0, done.output
    assert any(0x2800 < ord(character) <= 0x28FF for character in done.output), "a chart in braille"


def test_watch_once_prints_the_status(run: Path) -> None:
    done = z2a("watch", "--once", "--json", run)
    assert done.exit_code == 0, done.output
    [status] = json.loads(done.stdout)["runs"]
    assert status["step"] == 3


def test_memory_limit_of_tokenizer_training(workspace: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"tokenizer.dir={tmp_path}/tokenizer")), encoding="utf-8")
    refused = z2a("tokenizer", "train", recipe, "--workers", 1, "--max-memory", "64MiB")
    assert refused.exit_code == 2
    assert "max_memory" in refused.output
    assert not (tmp_path / "tokenizer").exists()


def test_quality_classifier_from_good_and_bad_files(tmp_path: Path) -> None:
    texts = {
        "good": [f"The old man sat by the door and told the children story number {n}." for n in range(30)],
        "bad": [f"BUY NOW!!! cheap pills {n} www.spam{n}.cn !!! click {n}" for n in range(30)],
    }
    for kind, lines in texts.items():
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    files = ["--good", tmp_path / "good.jsonl", "--bad", tmp_path / "bad.jsonl"]
    done = z2a("corpus", "quality", "train", *files, "--out", tmp_path / "model")
    assert done.exit_code == 0, done.output
    model = load_quality_model(tmp_path / "model")
    assert model.score("BUY NOW!!! cheap pills www.spam77.cn") < 0.5 < model.score("The children sat by the old door.")
