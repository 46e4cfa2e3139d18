"""`z2a recipe check` finds what `z2a corpus build` would refuse: paths, field mappings, filters."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.base.errors import RecipeProblem, UsageError
from zero2all.cli.main import app
from zero2all.corpus.readers.listing import list_files, path_problem
from zero2all.recipe import SourceRecipe


def problems(directory: Path, text: str, *overrides: str) -> list[RecipeProblem]:
    recipe = directory / "recipe.yaml"
    recipe.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, ["recipe", "check", str(recipe), *overrides, "--json"])
    found = [RecipeProblem(**problem) for problem in json.loads(done.stdout)["problems"]]
    assert done.exit_code == (2 if found else 0), done.output
    return found


REFUSED = """train: {steps: 1, lr: 3}
corpus:
  sources:
    - {name: a, paths: [texts, nowhere]}
    - name: b
      paths: [s3://bucket/x]
      mapping: alpacca
  decontaminate: [exams]
  filters:
    - normalize
    - too_shrt
    - {name: too_short, min_char: 3, max_chars: 5}
    - {name: quality_score, model: nowhere/quality}
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "a.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken link").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("texts", None),
        ("texts/deep/a.txt", None),
        ("texts/**/*.txt", None),
        ("texts/*", None),
        ("nowhere", "nothing at nowhere (relative to "),
        ("/nowhere/zh", "nothing at /nowhere/zh"),
        ("texts/*.jsonl", "nothing at texts/*.jsonl"),
        ("broken link", "nothing at broken link"),
        ("empty", "no files in empty"),
        ("", "empty path"),
        ("s3://bucket/nowhere", None),
        ("https://host.invalid/a.jsonl", None),
    ],
)
@pytest.mark.parametrize("follow_links", [False, True])
def test_a_path_without_files_is_a_problem(texts: Path, path: str, problem: str | None, follow_links: bool) -> None:
    found = path_problem(path, follow_links=follow_links)
    assert (found is None) if problem is None else (found is not None and found.startswith(problem))
    if problem is not None and not follow_links:
        with pytest.raises(UsageError, match=re.escape(problem)):
            list_files(SourceRecipe(name="a", paths=[path]))


def test_a_path_that_no_file_system_takes_is_a_problem() -> None:
    assert path_problem("x" * 5000) == "cannot be read: File name too long"


def test_a_large_directory_is_searched_only_up_to_its_first_file(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (texts / "texts" / f"d{number}").mkdir()
        (texts / "texts" / f"d{number}" / "b.txt").touch()
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(path), scandir(path))[1])
    assert path_problem("texts") is None
    assert len(listed) == 2


def test_everything_that_the_build_would_refuse_is_reported_with_its_line(texts: Path) -> None:
    found = problems(texts, REFUSED)
    assert [(one.line, one.path) for one in found] == [
        (1, "train.lr"),
        (4, "corpus.sources.0.paths.1"),
        (5, "corpus.sources.1"),
        (8, "corpus.decontaminate.0"),
        (11, "corpus.filters.1"),
        (12, "corpus.filters.2"),
        (12, "corpus.filters.2"),
        (13, "corpus.filters.3"),
    ]
    said = [one.message for one in found[2:]]
    assert "no mapping 'alpacca'" in said[0]
    assert "did you mean 'too_short'?" in said[2]
    assert "no option 'min_char'; did you mean 'min_chars'?" in said[3]
    assert "no option 'max_chars'" in said[4]
    assert "nowhere/quality" in said[5]


def test_paths_and_filters_of_an_override_are_mistakes_of_the_override(texts: Path) -> None:
    override = "corpus={sources: [{name: a, paths: [nowhere]}], filters: [{name: too_short, min_chars: many}]}"
    found = problems(texts, "train: {steps: 1}", override)
    assert [one.path for one in found] == ["corpus.sources.0.paths.0", "corpus.filters.0"]
    assert {one.override for one in found} == {override[:80] + "..."}
    assert "filter too_short, option min_chars" in found[1].message


def test_nothing_else_is_reported(texts: Path) -> None:
    """Not that a misspelled option is missing as well, and no path of a source that is wrong otherwise."""
    [found] = problems(texts, "{train: {steps: 1}, corpus: {filters: [{name: quality_score, modle: x}]}}")
    assert found.message == "filter quality_score has no option 'modle'; did you mean 'model'?"
    [found] = problems(texts, "{train: {steps: 1}, corpus: {sources: [{name: a/b, paths: [nowhere]}]}}")
    assert found.path == "corpus.sources.0.name"
    assert problems(texts, "{train: {steps: 1}, corpus: {sources: [{name: a, paths: [texts]}], filters: []}}") == []
