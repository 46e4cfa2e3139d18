"""The registry: names, options, versions, and what is imported when."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from zero2all.base import plugins
from zero2all.base.errors import RecipeError, UsageError
from zero2all.base.plugins import (
    API,
    KINDS,
    bind,
    builtin,
    builtin_names,
    find_plugin,
    installed,
    register,
    spec_problems,
)
from zero2all.cli.main import app
from zero2all.corpus.readers import RawFile, read_record_chunks
from zero2all.recipe import SourceRecipe, parse_recipe, recipe_schema
from zero2all.recipe.named_plugins import named_plugins, plugin_mistakes
from zero2all.train.resume import setting_changes

SOURCE = '''
from pathlib import Path
from zero2all.base.plugins import register

Path(__file__).with_suffix(".ran").touch()


@register("filter", "FILTER")
def theirs(document, *, share: float = 0.5, words: tuple[str, ...] = ()):
    """Fail on every document."""
    raise LookupError("no such word")


@register("filter", "FILTER-of-tomorrow", api=2)
def tomorrow(document): ...


def reward(prompt, answer, reference, *, scale: float = 1.0):
    return scale
'''


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of an installed distribution with entry points. Each test has its own, since modules stay imported."""
    name = f"theirs_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("FILTER", name))
    info = tmp_path / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    lines = ["[zero2all.filter]", f"{name} = {name}:theirs", f"{name}-of-tomorrow = {name}:tomorrow"]
    (info / "entry_points.txt").write_text("\n".join([*lines, "[zero2all.reward]", f"{name} = {name}:reward"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    return name


def test_an_installed_plugin_is_imported_when_it_is_named(distribution: str, tmp_path: Path) -> None:
    assert distribution in installed("filter")
    recipe = parse_recipe(f"corpus: {{filters: [{distribution}]}}")
    assert not list(tmp_path.glob("*.ran")), "it was imported by a recipe that was only read"
    assert not list(plugin_mistakes(recipe))
    assert list(tmp_path.glob("*.ran"))
    found = find_plugin("filter", distribution)
    assert (found.source, found.help, found.is_builtin) == (f"{distribution} 1.5", "Fail on every document.", False)


def test_options_are_checked_by_their_types(distribution: str) -> None:
    def problems(**options: object) -> list[str]:
        return spec_problems("filter", {"name": distribution, **options})

    assert problems(share="0.7", words=["a"]) == []
    assert problems(shares=1) == [f"filter {distribution} has no option 'shares'; did you mean 'share'?"]
    assert problems(share="much")[0].startswith(f"filter {distribution}, option share: ")
    assert bind("filter", {"name": distribution, "share": 1}).options == {"share": 1.0, "words": ()}
    assert bind("reward", {"name": distribution, "scale": 2})("a", "b", "c") == 2


def test_an_exception_names_the_plugin(distribution: str) -> None:
    bound = pickle.loads(pickle.dumps(bind("filter", distribution)))
    with pytest.raises(LookupError) as caught:
        bound(None)
    assert caught.value.__notes__ == [f"raised by the filter {distribution} of {distribution} 1.5"]


def test_a_plugin_for_a_different_api_fails_with_both_numbers(distribution: str) -> None:
    with pytest.raises(UsageError, match=rf"version 2 of the plugin API, .* version {API}.*{distribution}"):
        find_plugin("filter", f"{distribution}-of-tomorrow")


def test_a_file_has_a_checksum_as_its_version(distribution: str, tmp_path: Path) -> None:
    assert find_plugin("reward", f"{distribution}:reward").version.startswith("sha256:")


def test_unknown_names_are_corrected() -> None:
    with pytest.raises(UsageError, match="there is no sink 'tensorbord'; did you mean 'tensorboard'"):
        find_plugin("sink", "tensorbord")
    with pytest.raises(UsageError, match="there are tensorboard, wandb, module:Name"):
        find_plugin("sink", "zzz")
    with pytest.raises(RecipeError, match="or an installed function"):
        parse_recipe("train: {steps: 1, objective: {grpo: {rewards: [none]}}}")


def test_recipe_check_lists_installed_plugins_and_imports_none(distribution: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"corpus: {{filters: [{{name: {distribution}, shares: 1}}]}}\ntrain: {{steps: 1}}\n")
    done = CliRunner().invoke(app, ["recipe", "check", str(recipe), "--no-import", "--json"])
    assert done.exit_code == 0, done.output
    [imported] = json.loads(done.stdout)["imports"]
    assert imported == {"key": "corpus.filters.0", "name": distribution, "file": str(tmp_path / f"{distribution}.py")}
    assert not list(tmp_path.glob("*.ran"))
    done = CliRunner().invoke(app, ["recipe", "check", str(recipe)])
    assert done.exit_code == 2
    assert "has no option 'shares'" in done.output
    builtin_mistake = CliRunner().invoke(
        app, ["recipe", "check", str(recipe), "--no-import", "corpus.filters=[too_shrt]"]
    )
    assert "did you mean 'too_short'" in builtin_mistake.output


def test_two_plugins_cannot_have_one_name() -> None:
    find_plugin("filter", "too_short")
    with pytest.raises(ValueError, match="two filters are called too_short"):
        register("filter", "too_short")(print)


@pytest.mark.parametrize("kind", KINDS)
def test_built_in_plugins_are_registered_by_the_name_of_their_file(kind: str) -> None:
    """A recipe is validated by names alone, so a file must register what it is called."""
    for plugin in builtin(kind):
        assert plugin.is_builtin
        assert plugin.help, plugin.name
    assert {one.name for one in builtin(kind)} == {*builtin_names(kind)}
    assert plugins.is_builtin(kind, "no such plugin") is False


def test_a_source_can_name_its_reader(tmp_path: Path) -> None:
    (tmp_path / "table.dat").write_bytes(b"title,text\na,b\n")
    source = SourceRecipe(name="a", paths=[str(tmp_path / "table.dat")], reader="csv")
    [chunk] = read_record_chunks(RawFile.from_path(tmp_path / "table.dat"), reader=source.reader)
    assert chunk == [{"title": "a", "text": "b"}]


def test_options_of_a_removed_plugin_are_a_change() -> None:
    changes = list(setting_changes({"train.optimizer.options": {"beta": 1}}, {}))
    assert [str(change) for change in changes] == ["train.optimizer.options={'beta': 1}, not {}"]


def test_the_schedule_of_a_stage_is_a_named_plugin() -> None:
    stage = {"name": "a", "steps": 1, "schedule": {"shape": "theirs:f", "options": {"x": 1}}}
    recipe = parse_recipe(yaml.safe_dump({"train": {"stages": [stage]}}))
    assert ("train.stages.0.schedule", "schedule", {"x": 1, "name": "theirs:f"}) in list(named_plugins(recipe))


def test_the_schema_has_names_and_options_of_built_in_plugins() -> None:
    sections = json.loads(recipe_schema())["$defs"]
    assert "muon" in sections["OptimizerRecipe"]["properties"]["name"]["anyOf"][0]["enum"]
    choices = sections["CorpusRecipe"]["properties"]["filters"]["anyOf"][0]["items"]["oneOf"]
    [found] = [one["properties"] for one in choices if one.get("properties", {}).get("name") == {"const": "too_short"}]
    assert found["min_chars"]["default"] == 50
