"""A workspace with a run, for tests that add runs to it or change its data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.recipe import recipe_yaml
from zero2all.train import train


@pytest.fixture(scope="session")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that nobody writes to: its stages, and a run of two steps."""
    out = tmp_path_factory.mktemp("siblings") / "first"
    for name in ("documents", "tokenizer", "tokens"):
        shutil.copytree(workspace / name, out / name)
    directories = [f"{stage}.dir=null" for stage in ("corpus", "tokenizer", "tokens")]
    recipe = tiny_recipe(workspace, f"out={out}", "train.steps=2", *directories)
    (out.parent / "my.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    train(recipe)
    return out


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, with the recipe ``my.yaml`` beside."""
    shutil.copytree(trained, tmp_path / "first")
    text = (trained.parent / "my.yaml").read_text(encoding="utf-8")
    (tmp_path / "my.yaml").write_text(text.replace(str(trained), str(tmp_path / "first")), encoding="utf-8")
    return tmp_path / "first"


@pytest.fixture
def recipe(out: Path) -> Path:
    return out.parent / "my.yaml"
