"""Recipes, runs and tokenizers with the keys of 0.1. The files in ``run_of_0_1`` were written by that version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero2all.errors import RecipeError
from zero2all.io import fingerprint
from zero2all.recipe import ModelConfig, Recipe, load_recipe, parse_recipe
from zero2all.recipe.problems import known_keys
from zero2all.recipe.renamed import RENAMED, RENAMED_VALUES, identity_to_new, to_new, to_old
from zero2all.tokenizer.train import FORMAT, training_settings
from zero2all.train.run import model_identity

OLD = Path(__file__).with_name("run_of_0_1")


def old_values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((OLD / "recipe.yaml").read_text())
    return values


def old_json(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((OLD / name).read_text())
    return values


def nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = [value] if key == "*" else {key: value}
    assert isinstance(value, dict)
    return value


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, list(overrides))
    return [str(problem) for problem in caught.value.problems]


def test_a_stored_recipe_of_0_1_loads_with_its_values() -> None:
    recipe = load_recipe(OLD / "recipe.yaml", ["train.guard.window=32"], stored=True)
    model, moe = recipe.model, recipe.model.moe
    assert (model.num_hidden_layers, model.num_attention_heads, model.num_key_value_heads) == (2, 4, 2)
    assert (model.max_position_embeddings, model.tie_word_embeddings, model.full_attention_interval) == (64, True, 2)
    assert (model.final_logit_softcapping, model.initializer_range, model.rms_norm_eps) == (30.0, 0.03, 1e-6)
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (4, 2, 24)
    assert (moe.n_shared_experts, moe.first_k_dense_replace, moe.scoring_func) == (1, 1, "sigmoid")
    assert (moe.load_balancing, moe.router_aux_loss_coef, moe.bias_update_rate) == ("bias", 0.02, 0.002)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.rope_type, model.rope_scaling.original_max_position_embeddings) == ("yarn", 32)
    train, far = recipe.train, recipe.train.stages[1]
    assert (train.optimizer.max_grad_norm, train.schedule.min_lr_ratio, train.schedule.decay_ratio) == (0.5, 0.15, 0.25)
    assert (train.guard.min_loss_change, train.guard.min_norm_factor, train.guard.window) == (0.2, 6.0, 32)
    assert far.schedule is not None
    assert far.schedule.min_lr_ratio == 0.05
    assert far.rope_scaling is not None
    assert (far.rope_scaling.rope_type, far.rope_scaling.original_max_position_embeddings) == ("llama3", 32)
    assert (recipe.parallel.reshard_after_forward, recipe.parallel.cp_attention) == ("never", "allgather")
    assert (recipe.checkpoint.keep_latest, recipe.track.log_every) == (3, 4)
    assert (recipe.tokenizer.max_han_run, recipe.tokenizer.train_bytes) == (12, 5_000_000)


@pytest.mark.parametrize("name", ["identity.json", "state.json"])
def test_the_identity_of_an_old_run_is_that_of_its_recipe(name: str) -> None:
    recipe, translated = load_recipe(OLD / "recipe.yaml", stored=True), identity_to_new(old_json(name))
    config = ModelConfig.model_validate(translated["model"])
    assert translated["model"] == model_identity(config)
    assert config == recipe.model.model_copy(update={"vocab_size": 512})
    scaling = recipe.train.stages[1].rope_scaling
    assert scaling is not None
    assert translated["stages"][1]["rope"][1] == scaling.model_dump(mode="json")
    if "rope" in translated:
        assert translated["rope"]["rope_scaling"] == scaling.model_dump(mode="json")
    assert identity_to_new(translated) == translated


def test_the_key_of_an_old_tokenizer_is_still_its_key() -> None:
    recipe, keys = load_recipe(OLD / "recipe.yaml", stored=True), old_json("keys.json")
    settings = training_settings(recipe.tokenizer)
    assert fingerprint([FORMAT, keys["documents"]["key"], settings]) == keys["tokenizer"]["key"]
    assert training_settings(recipe.tokenizer.model_copy(update={"special_tokens": ["<a>"]})) != settings


def test_translation_is_idempotent_and_reversible() -> None:
    old = old_values()
    assert to_new(to_new(old)) == to_new(old) != old
    assert to_old(to_new(old)) == old


@pytest.mark.parametrize("path", RENAMED)
def test_every_retired_key_is_one_mistake_that_names_the_new_key(path: str) -> None:
    first_line = yaml.safe_dump(nested(path, 4)).count("\n")  # its key is in the last line
    said = mistakes(yaml.safe_dump(nested(path, 4)))
    shown = path.replace("*", "0")
    assert f"line {first_line}: `{shown}` is now `{RENAMED[path]}`" in said
    assert not any("no such key" in problem for problem in said)


@pytest.mark.parametrize("path", RENAMED)
def test_every_new_key_is_known_and_no_retired_one_is(path: str) -> None:
    *section, old = (0 if key == "*" else key for key in path.split("."))
    known = known_keys(tuple(section))
    assert RENAMED[path] in known
    assert old not in known
    assert all(path.split(".")[0] in Recipe.model_fields for path in RENAMED_VALUES)


def test_a_retired_key_is_the_only_mistake_even_if_its_default_would_not_fit() -> None:
    text = "model:\n  hidden_size: 256\n  n_heads: 4\ntrain: {steps: 1}"
    assert mistakes(text) == ["line 3: `model.n_heads` is now `num_attention_heads`"]


@pytest.mark.parametrize("override", ["model.n_heads=3", "model={n_heads: 3}"])
def test_a_retired_key_on_the_command_line_is_a_mistake(override: str) -> None:
    said = mistakes("train: {steps: 1}", override)
    assert said == [f"command line, {override}: `model.n_heads` is now `num_attention_heads`"]


def test_a_retired_key_beside_the_new_one_is_one_mistake() -> None:
    said = mistakes("{train: {steps: 1}, model: {tied: true, tie_word_embeddings: false}}")
    assert said == ["line 1: `model.tied` is now `tie_word_embeddings` (both are given: remove `tied`)"]


def test_a_retired_value_is_a_mistake() -> None:
    said = mistakes("{train: {steps: 1}, parallel: {cp_attention: gather}}")
    assert said == ["line 1: `parallel.cp_attention: gather` is now `allgather`"]


def test_a_wrong_value_of_a_retired_key_is_named_with_its_line() -> None:
    said = mistakes("train: {steps: 1}\nmodel:\n  n_layers: many")
    assert said[0] == "line 3: `model.n_layers` is now `num_hidden_layers`"
    assert said[1].startswith("line 3, model.num_hidden_layers: ")
