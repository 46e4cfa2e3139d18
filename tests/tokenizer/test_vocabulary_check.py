"""``z2a recipe check`` compares the vocabulary of the model with that of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.cli.main import app
from zero2all.recipe import PRESETS, parse_recipe
from zero2all.tokenizer.vocabulary_check import vocabulary_mistakes, vocabulary_remark


def test_a_preset_with_a_larger_vocabulary_than_the_tokenizer_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"out: {tmp_path}\nmodel: {{preset: z2all-1.1b}}\ntrain: {{steps: 1}}\n", encoding="utf-8")
    checked = CliRunner().invoke(app, ["recipe", "check", str(path)])
    assert checked.exit_code == 0, checked.output
    size = PRESETS["z2all-1.1b"]["vocab_size"]
    assert f"model.vocab_size is {size} (preset z2all-1.1b), but tokenizer.vocab_size is 8192" in checked.stdout
    [remark] = json.loads(CliRunner().invoke(app, ["recipe", "check", str(path), "--json"]).stdout)["remarks"]
    assert "56128 rows of the embedding and the head are never used" in remark
    equal = CliRunner().invoke(app, ["recipe", "check", str(path), f"tokenizer.vocab_size={size}"])
    assert "remark" not in equal.stdout


@pytest.mark.parametrize(
    ("size", "is_mistake", "is_remark"), [(448, True, False), (512, False, False), (576, False, True)]
)
def test_the_vocabulary_of_a_tokenizer_that_exists_counts(
    workspace: Path, size: int, is_mistake: bool, is_remark: bool
) -> None:
    recipe = parse_recipe(
        f"tokenizer: {{dir: {workspace}/tokenizer}}\nmodel: {{vocab_size: {size}}}\ntrain: {{steps: 1}}", []
    )
    found = [mistake.message for mistake in vocabulary_mistakes(recipe)]
    assert bool(found) == is_mistake
    assert (vocabulary_remark(recipe) is not None) == is_remark
    if is_mistake:
        assert found[0].startswith("model.vocab_size (448) is smaller than the vocabulary in ")
        assert "(512): set model.vocab_size=512, or null" in found[0]
