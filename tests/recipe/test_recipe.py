from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.base.errors import RecipeError, UsageError
from zero2all.base.units import Duration
from zero2all.base.workspace import did_you_mean
from zero2all.cli.main import app
from zero2all.recipe import (
    PRESETS,
    Recipe,
    load_recipe,
    load_recipe_or_preset,
    parse_recipe,
    recipe_schema,
    recipe_yaml,
)
from zero2all.train.run import Run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("train: {}", "train"),
        ("train: {steps: 1, tokens: 5}", "train"),
        ("parallel: {tp: 2}", "recipe"),
        ("model: {preset: z2all-9t}", "model.preset"),
        ("corpus: {sources: [{name: a, paths: [x]}, {name: a, paths: [y]}]}", "corpus.sources"),
        ("corpus: {sources: [{name: ../a, paths: [x]}]}", "corpus.sources.0.name"),
        ("{train: {steps: 1, mixture: {c: 1}}, corpus: {sources: [{name: a, paths: [x]}]}}", "recipe"),
        ("train: {steps: abc}", "train.steps"),
        ("{train: {steps: 1}, corpus: {sources: [{name: a, paths: []}]}}", "corpus.sources.0.paths"),
        ("train: {steps: 1, optimizer: {betas: [2, 0.9]}}", "train.optimizer.betas.0"),
        ("model: {preset: [a]}", "model.preset"),
        ("tokenizer: {vocab_size: 64}", "tokenizer.vocab_size"),
    ],
)
def test_each_rule_can_fail_and_no_mistake_is_reported_that_nobody_made(text: str, path: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    assert {problem.path for problem in caught.value.problems} == {path}


def test_another_preset_on_a_resolved_recipe_is_another_shape() -> None:
    resolved = recipe_yaml(parse_recipe("{train: {steps: 1}, model: {preset: z2all-3m, qk_norm: true}}"))
    model = parse_recipe(resolved, ["model.preset=z2all-25m", "model.num_hidden_layers=3"]).model
    assert (model.hidden_size, model.num_hidden_layers, model.qk_norm) == (512, 3, True)
    assert parse_recipe(resolved, ["model.num_hidden_layers=3", "model.preset=z2all-25m"]).model == model
    experts = parse_recipe(resolved, ["model.preset=30b-a3b"])
    assert (experts.model.head_dim, experts.model.moe and experts.model.moe.num_experts) == (128, 128)
    dense = parse_recipe(recipe_yaml(experts), ["model.preset=7b"]).model
    assert (dense.head_dim, dense.moe, dense.qk_norm) == (None, None, False)


@pytest.mark.parametrize(("text", "tokens"), [("4.1M", 4_100_000), ("16.1K", 16_100), ("64Ki", 65536), ("1e3", 1000)])
def test_counts_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_recipe(f"evals: {{tokens: {text}}}", ["train.steps=1"]).evals.tokens == tokens


def test_overrides_win_and_a_length_replaces_a_length_of_another_unit() -> None:
    recipe = parse_recipe(
        "train: {tokens: 10M}", ["train.steps=200", "model.num_hidden_layers=4", "train.optimizer.lr=1e-3"]
    )
    assert (recipe.train.steps, recipe.train.tokens, recipe.model.num_hidden_layers) == (200, None, 4)
    assert recipe.train.optimizer.lr == 1e-3


@pytest.mark.parametrize("override", ["train.steps", "=5", ".a=5", "train.steps=[1"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(UsageError):
        parse_recipe("", [override])


def test_a_resolved_recipe_loads_as_itself() -> None:
    recipe = parse_recipe("{model: {preset: z2all-10m}, train: {epochs: 1.5, schedule: {warmup: 2M tokens}}}")
    assert parse_recipe(recipe_yaml(recipe)) == recipe


def test_shipped_recipes_are_valid() -> None:
    paths = {path.name: path for path in (ROOT / "recipes").glob("**/*.yaml")}
    assert {"quickstart.yaml", "70b-1024.yaml"} <= paths.keys()
    names = {load_recipe(path).name for path in paths.values()}
    assert len(names) == len(paths), "each run has its own name"


def test_the_schema_describes_every_field_in_sentences() -> None:
    schema = json.loads(recipe_schema())
    assert set(schema["properties"]) == set(Recipe.model_fields)
    for section in (schema, *schema["$defs"].values()):
        for name, field in section["properties"].items():
            referenced = schema["$defs"].get(field.get("$ref", "").split("/")[-1], {})  # which may describe itself
            text = field.get("description") or referenced.get("description", "")
            assert re.fullmatch(r"[A-Z`].*\.", text, re.DOTALL), f"{section['title']}.{name}: {text!r}"
            assert not text.startswith("Of "), f"{section['title']}.{name}: {text!r}"


def test_every_preset_is_a_valid_shape() -> None:
    for name in PRESETS:
        parse_recipe(f"model: {{preset: {name}}}", ["train.steps=1"])


def test_reference_shape() -> None:
    model = parse_recipe("model: {preset: z2all-1.1b}", ["train.steps=1"]).model
    assert (model.hidden_size, model.intermediate_size, model.num_hidden_layers) == (2048, 5632, 22)
    assert (model.num_attention_heads, model.num_key_value_heads, model.max_position_embeddings) == (32, 8, 2048)
    assert (model.vocab_size, model.rope_theta) == (64320, 10000.0)


@pytest.mark.parametrize(
    ("text", "steps"),
    [(20, 20), ("20 steps", 20), ("1 step", 1), ("1M tokens", 10), ("64Ki tokens", 0), ("2 epochs", 20), (0.5, None)],
)
def test_durations(text: object, steps: int | None) -> None:
    if steps is None:
        with pytest.raises(ValueError, match=r"0\.5"):
            Duration.parse(text)
    else:
        assert Duration.parse(text).in_steps(tokens_per_step=100_000, tokens_per_epoch=1_000_000) == steps


def test_a_mistake_on_the_command_line_has_its_override_and_no_line_of_the_file() -> None:
    text = "train:\n  steps: 1\n  seq_len: 8\nmodel:\n  hidden_size: 64\n"
    with pytest.raises(RecipeError) as raised:
        parse_recipe(text, ["train.stps=3", "train.seq_len=x", "model={n_layers: 2, hidden_size: y}"])
    assert {problem.path: (problem.line, problem.override) for problem in raised.value.problems} == {
        "train.stps": (None, "train.stps=3"),
        "train.seq_len": (None, "train.seq_len=x"),
        "model.n_layers": (None, "model={n_layers: 2, hidden_size: y}"),
        "model.hidden_size": (None, "model={n_layers: 2, hidden_size: y}"),
    }
    assert "  - command line, train.stps=3: no such key (did you mean steps?)" in str(raised.value)
    assert "  - command line, model={n_layers: 2, hidden_size: y}, model.hidden_size: Input" in str(raised.value)
    with pytest.raises(RecipeError, match=r"line 5, model\.hidden_size"):
        parse_recipe(text.replace("64", "y"), ["train.steps=3"])


def test_a_missing_recipe_names_those_that_there_are(tmp_path: Path) -> None:
    """Beside it, or in recipes/ if there is none beside it."""
    with pytest.raises(UsageError, match=r"nowhere/other\.yaml$"):
        load_recipe(tmp_path / "nowhere" / "other.yaml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.yaml").touch()
    with pytest.raises(UsageError, match=r"in .*/recipes/ there are small\.yaml$"):
        load_recipe(tmp_path / "other.yaml")
    (tmp_path / "mine.yaml").touch()
    (tmp_path / ".hidden.yaml").touch()
    with pytest.raises(UsageError, match=r"there are mine\.yaml$"):
        load_recipe(tmp_path / "other.yaml")
    with pytest.raises(UsageError, match=r"neither recipe\.yaml nor run/recipe\.yaml.*there are mine\.yaml$"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("place", ["recipe.yaml", "run/recipe.yaml"])
def test_a_run_directory_stands_for_its_recipe(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("{train: {steps: 3}, model: {num_hidden_layers: 2}}")
    for target in {tmp_path, path.parent}:
        recipe = load_recipe(target, ["train.steps=4"])
        assert (recipe.train.steps, recipe.model.num_hidden_layers) == (4, 2)
        assert load_recipe_or_preset(str(target)).train.steps == 3
    with pytest.raises(RecipeError, match=r"recipe\.yaml: 1 mistake\n.*command line, model\.n_layers=3"):
        load_recipe(tmp_path, ["model.n_layers=3"])


EXPERTS = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{preset: z2all-3m}", []),
        ("{preset: z2all-3m, residual_dropout: 0.1}", ["dropout"]),
        (f"{{preset: z2all-3m, moe: {{{EXPERTS}, load_balancing: aux}}}}", ["model.moe.load_balancing=aux"]),
        (f"{{preset: z2all-3m, moe: {{{EXPERTS}, load_balancing: bias}}}}", []),
    ],
)
def test_the_check_warns_where_losses_depend_on_the_layout(model: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"model: {model}\n")
    done = CliRunner().invoke(app, ["recipe", "check", str(tmp_path / "recipe.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    assert [remark.split(" ")[0].rstrip(":") for remark in json.loads(done.stdout)["remarks"]] == said
    shown = CliRunner().invoke(app, ["recipe", "check", str(tmp_path / "recipe.yaml")]).stdout
    assert shown.count("remark: ") == len(said)


# --- paths that do not exist: the one beside them that was meant


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
