"""Frequent errors lead to the documentation: every pattern finds a message of the source, and its page explains it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reference_generator.error_messages import Message, messages, templates
from tests.test_docs import anchors
from zero2all.base.errors import RecipeError, RecipeProblem
from zero2all.cli.error_pages import ERROR_PAGES, REFERENCE, help_anchor
from zero2all.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("code", ERROR_PAGES)
def test_a_pattern_finds_a_message_of_the_source(code: str) -> None:
    pattern = ERROR_PAGES[code].pattern
    for part in re.split(r"\|(?![^()]*\))", pattern):
        assert any(re.search(part, one.example) for one in messages()), f"no message like {part!r}"


@pytest.mark.parametrize("code", ERROR_PAGES)
def test_a_code_has_a_heading_and_a_page_in_both_languages(code: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)
    for ending in (".md", ".zh-CN.md"):
        assert code in anchors(REFERENCE.replace(".md", ending))
        assert (ROOT / "docs" / f"{ERROR_PAGES[code].page}{ending}").is_file()


def test_no_message_has_two_codes() -> None:
    found = {
        one.template: [code for code, known in ERROR_PAGES.items() if re.search(known.pattern, one.example)]
        for one in messages()
    }
    assert {message: codes for message, codes in found.items() if len(codes) > 1} == {}


def test_messages_of_functions_and_constants_are_found() -> None:
    found = {one.template for one in messages()}
    assert any(text.startswith("no job secret in {") for text in found), "returned by a function"
    assert "the model's logits are NaN: its weights are damaged, try an earlier checkpoint" in found, "a constant"
    assert len(found) > 450
    assert {one.package for one in messages()} > {"base", "checkpoint", "cli", "corpus", "train"}


def test_an_expression_becomes_a_template() -> None:
    import ast

    def of(text: str) -> list[str]:
        return list(templates(ast.parse(text, mode="eval").body))

    assert of("f'no {self.kind} in {path!r}: {len(names)}'") == ["no {kind} in {path}: {number}"]
    assert of("'a' if x else f'b {y}'") == ["a", "b {y}"]
    assert of("'a ' + other()") == ["a …"]
    assert Message("corpus/fetch/x.py", "has {number} of {size}").example == "has 2 of size"


def test_an_error_names_the_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["recipe", "check", str(tmp_path / "missing.yaml")])
    assert done.exit_code == 2
    assert f"see {REFERENCE}#no-recipe\n" in done.stderr
    assert done.stderr.index("error: ") < done.stderr.index("see ")


def test_an_error_without_a_page_prints_no_more_than_the_message() -> None:
    assert help_anchor("give only one of --once, --tty and --html") is None
    assert help_anchor("no run in runs/x: 'z2a train' writes one") == f"{REFERENCE}#no-run"
    mistakes = RecipeError("my.yaml", [RecipeProblem("train.stepz", "no such key")])
    assert help_anchor(str(mistakes)) == f"{REFERENCE}#recipe-mistakes"
