"""From command lines to variants."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import TINY
from zero2all.base.errors import RecipeError, UsageError
from zero2all.experiments.variants import plan_comparison, plan_sweep, split_values


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(f"{TINY}\nout: {tmp_path}/out\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,2e-3", ["1e-3", "2e-3"]),
        (" a , b ", ["a", "b"]),
        ("[a,b]", ["[a,b]"]),
        ("[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("{zh: 0.6, en: 0.4},{zh: 1}", ["{zh: 0.6, en: 0.4}", "{zh: 1}"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("don't,won't", ["don't", "won't"]),
        ("", [""]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_commas_separate_values_except_inside_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@given(st.text(alphabet="ab,[]{}'\" ", max_size=20))
@settings(max_examples=200)
def test_no_text_is_lost(text: str) -> None:
    assert "".join(split_values(text)).replace(",", "").replace(" ", "") == text.replace(",", "").replace(" ", "")


def test_a_grid_has_every_combination_with_the_first_seed_of_all_first(recipe: Path, tmp_path: Path) -> None:
    plan = plan_sweep(recipe, ["train.optimizer.lr=1e-3,2e-3", "model.num_hidden_layers=2,3", "train.steps=5"], 2)
    assert plan.name == "sweep-lr-num_hidden_layers"
    assert plan.directory == tmp_path / "out" / "experiments" / plan.name
    assert plan.keys == ["train.optimizer.lr", "model.num_hidden_layers"]
    assert [variant.record.name for variant in plan.variants[:5]] == [
        "lr-1e-3-num_hidden_layers-2-seed11",
        "lr-1e-3-num_hidden_layers-3-seed11",
        "lr-2e-3-num_hidden_layers-2-seed11",
        "lr-2e-3-num_hidden_layers-3-seed11",
        "lr-1e-3-num_hidden_layers-2-seed12",
    ]
    last = plan.variants[-1]
    assert last.record.values == {"train.optimizer.lr": 0.002, "model.num_hidden_layers": 3}
    assert last.record.group == "lr=2e-3 num_hidden_layers=3"
    assert (last.recipe.seed, last.recipe.train.steps, last.recipe.train.optimizer.lr) == (12, 5, 0.002)
    assert last.recipe.run_dir == plan.directory / last.record.name
    assert last.recipe.tokens_dir == tmp_path / "out" / "tokens"
    assert len({variant.record.key for variant in plan.variants}) == len(plan.variants) == 8


def test_lists_and_units_are_values(recipe: Path) -> None:
    betas = plan_sweep(recipe, ["train.optimizer.betas=[0.9,0.95],[0.9,0.99]"], 1)
    assert [variant.recipe.train.optimizer.betas for variant in betas.variants] == [(0.9, 0.95), (0.9, 0.99)]
    sizes = plan_sweep(recipe, ["train.batch_tokens=256,1Ki"], 1)
    assert [variant.record.values["train.batch_tokens"] for variant in sizes.variants] == [256, 1024]
    assert [variant.record.name for variant in sizes.variants] == ["batch_tokens-256-seed11", "batch_tokens-1Ki-seed11"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.optimizer.lr=1e-3"], "no key has several values"),
        (["train.optimizer.lr"], "write KEY=VALUE,VALUE"),
        (["train.optimizer.lr=1e-3,,2e-3"], "nothing between two commas"),
        (["train.optimizer.lr=1e-3,0.001"], "another variant has the same values"),
        (["train.optimizer.lr=1,2", "train.optimizer.lr=3,4"], "is given twice"),
        (["seed=1,2"], "see --seeds"),
        (["train.optimizer.lr=1e-3,2e-3", "run=there"], "see --name"),
        (["seed=3", "train.optimizer.lr=1e-3,2e-3"], "see --seeds"),
        (["train.steps=" + ",".join(map(str, range(1, 9000)))], "are more than"),
    ],
)
def test_what_is_refused(recipe: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_sweep(recipe, words, 1)


def test_a_mistake_in_any_variant_is_found_before_anything_is_trained(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.optimizer\.lr=-1"):
        plan_sweep(recipe, ["train.optimizer.lr=1e-3,-1"], 1)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".hidden", "-x", "名字", "tokens"])
def test_a_name_is_a_directory_below_experiments(recipe: Path, name: str) -> None:
    if name:
        with pytest.raises(UsageError, match="--name"):
            plan_sweep(recipe, ["train.optimizer.lr=1e-3,2e-3"], 1, name)
    else:
        assert plan_sweep(recipe, ["train.optimizer.lr=1e-3,2e-3"], 1, name).name == "sweep-lr"


def test_variants_with_another_tokenizer_or_text_have_their_own_stages(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = plan_sweep(recipe, ["tokenizer.vocab_size=512,1024", "corpus.holdout=0.1,0.2"], 1)
    places = [(one.recipe.documents_dir, one.recipe.tokenizer_dir, one.recipe.tokens_dir) for one in plan.variants]
    assert places[0] == (out / "documents", out / "tokenizer", out / "tokens")  # the recipe as it is
    assert places[2][0] == out / "documents"
    assert places[1][0] == places[3][0] != out / "documents"
    assert len({place[1] for place in places}) == len({place[2] for place in places}) == 4
    assert all(plan.directory / "stages" in path.parents for place in places[1:] for path in place[1:])


def test_recipes_of_other_workspaces_keep_their_stages_and_explicit_directories_too(
    recipe: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("/out\n", "/elsewhere\n"), encoding="utf-8")
    plan = plan_comparison([recipe, other], [f"tokenizer.dir={tmp_path}/mine"], 1)
    first, second = (variant.recipe for variant in plan.variants)
    assert first.out == second.out == tmp_path / "out"
    assert (second.documents_dir, second.tokens_dir) == (
        tmp_path / "elsewhere/documents",
        tmp_path / "elsewhere/tokens",
    )
    assert first.tokenizer_dir == second.tokenizer_dir == tmp_path / "mine"


def test_every_run_has_its_own_checkpoints(recipe: Path, tmp_path: Path) -> None:
    plan = plan_sweep(recipe, ["train.optimizer.lr=1e-3,2e-3", f"checkpoint.dir={tmp_path}/ckpt"], 2)
    places = {variant.recipe.checkpoint_dir for variant in plan.variants}
    assert len(places) == 4
    assert all(place is not None and place.is_relative_to(tmp_path / "ckpt") for place in places)


def test_one_recipe_given_twice_gets_other_seeds(recipe: Path, tmp_path: Path) -> None:
    plan = plan_comparison([recipe, recipe], [], 2)
    assert [(one.record.group, one.record.seed) for one in plan.variants] == [
        ("my", 11), ("my-2", 13), ("my", 12), ("my-2", 14),
    ]  # fmt: skip
    same_but_for_the_seed = tmp_path / "b.yaml"
    same_but_for_the_seed.write_text(recipe.read_text().replace("seed: 11", "seed: 12"), encoding="utf-8")
    plan = plan_comparison([recipe, same_but_for_the_seed], [], 2)
    assert [(one.record.group, one.record.seed) for one in plan.variants] == [
        ("my", 11), ("b", 13), ("my", 12), ("b", 14),
    ]  # fmt: skip
    assert plan.name == "my-vs-b"


def test_names_in_other_scripts_stay_apart(recipe: Path) -> None:
    paths = []
    for name in ("三国.yaml", "红楼.yaml"):
        paths.append(recipe.with_name(name))
        paths[-1].write_text(recipe.read_text(), encoding="utf-8")
    one, other = (plan_comparison([path], [], 1) for path in paths)
    assert one.name != other.name
    assert [variant.record.group for variant in one.variants] == ["三国"]


def test_what_is_recorded_and_where_a_run_is_do_not_change_its_key(recipe: Path) -> None:
    def key(*overrides: str) -> str:
        return plan_comparison([recipe], list(overrides), 1, "x").variants[0].record.key

    assert key("track.log_every=3", "checkpoint.every=2 steps", "out=elsewhere", "name=other") == key()
    for override in ("seed=4", "train.steps=3", "model.num_hidden_layers=3", "evals.tokens=100"):
        assert key(override) != key(), override
