"""Paths that do not exist: the one beside them that was meant; and what an object store can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero2all.base.errors import RecipeError, UsageError
from zero2all.base.workspace import did_you_mean
from zero2all.recipe import load_recipe, parse_recipe
from zero2all.train.run import Run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("first", "second", ".first"):
        (tmp_path / "runs" / name / "deeper").mkdir(parents=True)
    (tmp_path / "my.yaml").touch()
    return tmp_path / "runs"


def test_a_misspelled_run_suggests_the_one_that_exists(runs: Path) -> None:
    with pytest.raises(UsageError, match=rf"no recipe at {runs}/frist; did you mean {runs}/first\?$"):
        load_recipe(runs / "frist")
    with pytest.raises(UsageError, match=rf"no run in {runs}/frist; did you mean {runs}/first\?$"):
        Run.open(runs / "frist")
    with pytest.raises(
        UsageError, match=rf"no recipe at {runs.parent}/mine.yaml; did you mean {runs.parent}/my.yaml\?"
    ):
        load_recipe(runs.parent / "mine.yaml")


def test_the_misspelled_part_may_be_a_parent(runs: Path) -> None:
    assert did_you_mean(runs / "frist" / "deeper") == f"; did you mean {runs}/first/deeper?"


@pytest.mark.parametrize("path", ["runs/other", "runs/x", "elsewhere/first"])
def test_nothing_is_suggested_that_is_not_close(runs: Path, path: str) -> None:
    assert did_you_mean(runs.parent / path) == ""


def test_a_remote_out_names_the_keys_that_take_an_object_store() -> None:
    said = r"must be a local directory; an object store can hold the checkpoints \(checkpoint\.dir\)"
    with pytest.raises(RecipeError, match=said):
        parse_recipe("train: {steps: 1}", ["out=s3://bucket/run"])
