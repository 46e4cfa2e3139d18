"""Names of sources in any script: in the recipe as written, in file names plain ASCII."""

from __future__ import annotations

import math
import re
import unicodedata

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.base.errors import RecipeError
from zero2all.recipe import Recipe, SourceRecipe, parse_recipe, recipe_yaml
from zero2all.recipe.safe_yaml import read_yaml
from zero2all.recipe.source_names import MAX_CHARACTERS, source_file_name, source_file_names, to_source_name

NAMES = ["三国演义", "my notes", "Café", "книги", "کتاب‌ها", "😀", "v1.0", "a=b", "<b>", "-x", "..", "2024", "红" * 180]
REFUSED = ["", " a", "a ", "a/b", "a\\b", "a@1", "a\nb", "a\x00", "a\x7f", "a\u202eb", "a\u2028b", "x" * 181]


def recipe_of(*names: str, train: str = "{epochs: 1}") -> Recipe:
    sources = yaml.safe_dump(
        [{"name": name, "paths": ["x"]} for name in names], default_flow_style=True, width=math.inf
    )
    return parse_recipe(f"train: {train}", [f"corpus.sources={sources}"])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_keeps_a_name_as_it_is_written(name: str) -> None:
    recipe = recipe_of(name)
    assert [source.name for source in recipe.corpus.sources] == [name]
    assert parse_recipe(recipe_yaml(recipe)) == recipe


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_cannot_be_shown_or_split_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=r"corpus\.sources\.0\.name"):
        recipe_of(name)


def test_two_spellings_of_an_accent_are_one_name() -> None:
    decomposed = unicodedata.normalize("NFD", "Café")
    recipe = recipe_of(decomposed, "other", train="{epochs: 1, mixture: {Café: 2, other: 1}}")
    assert recipe.corpus.sources[0].name == "Café"
    recipe = recipe_of("Café", "other", train=f"{{epochs: 1, mixture: {{{decomposed}: 2, other: 1}}}}")
    assert recipe.train.mixture == {"Café": 2, "other": 1}
    with pytest.raises(RecipeError, match="two sources share the name Café"):
        recipe_of(decomposed, "Café")


def test_a_weight_is_set_on_the_command_line() -> None:
    recipe = recipe_of("三国 演义", "en", train="{epochs: 1, mixture: {en: 1}}")
    assert parse_recipe(recipe_yaml(recipe), ["train.mixture.三国 演义=2"]).train.mixture == {"en": 1, "三国 演义": 2}


@pytest.mark.parametrize("name", ["zh", "EN_2", "web-crawl", "_", "x" * 180])
def test_a_plain_name_is_its_file_name(name: str) -> None:
    assert source_file_name(name) == name


def test_file_names_are_ascii_short_and_differ_in_more_than_case() -> None:
    names = [*NAMES, "café", "CAFÉ", "Cafe", "News", "news", "NEWS", "三国 演义", "三国_演义", "v1.1", "my_notes"]
    files = source_file_names(names)
    assert list(files) == names
    assert len({file.lower() for file in files.values()}) == len(names)
    for name, file in files.items():
        assert (re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", file) and len(file) <= 60) or file == name
    assert files["News"] == "News"
    assert files["Café"].startswith("Cafe-")


@given(st.text(max_size=400))
@settings(max_examples=200)
def test_any_text_becomes_a_valid_name(label: str) -> None:
    name = to_source_name(label)
    values, _ = read_yaml(yaml.safe_dump({"name": name, "paths": ["x"]}), "a source")
    assert SourceRecipe(**values).name == name
    assert 0 < len(name) <= MAX_CHARACTERS


def test_a_directory_name_stays_as_it_is() -> None:
    assert [to_source_name(name) for name in NAMES] == NAMES
    assert to_source_name("a/b\n\ud800") == "a_b__"
