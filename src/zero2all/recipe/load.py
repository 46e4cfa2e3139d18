"""From YAML and overrides to a Recipe, or to the list of everything that is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from zero2all.base.errors import RecipeError, UsageError
from zero2all.base.workspace import DEFAULT_RUN, IDENTITY_FILE, did_you_mean, find_runs_below, workspace_of
from zero2all.recipe.model import PRESETS, SHAPE_FIELDS, ModelConfig
from zero2all.recipe.problems import Check, Places, find_problems, override_place, shorten
from zero2all.recipe.safe_yaml import MAX_DEPTH, MAX_FILE_BYTES, KeyPath, read_yaml
from zero2all.recipe.sections import Recipe
from zero2all.recipe.training import LENGTH_KEYS

RECIPE_FILE = "recipe.yaml"  # in the directory of a quickstart or a run


def load_recipe(path: str | Path, overrides: list[str] | None = None, checks: Iterable[Check] = ()) -> Recipe:
    """Read a YAML recipe and apply ``section.key=value`` overrides to it. A run directory stands for its recipe.

    What ``checks`` find is reported with all other mistakes.
    """
    path = Path(path)
    is_directory = path.is_dir()
    if is_directory:
        path = _stored_recipe_path(path)
    try:
        with open(path, "rb") as stream:  # which may be a pipe, and may have no end
            text = stream.read(MAX_FILE_BYTES + 1).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"no recipe at {path}{did_you_mean(path) or _sibling_recipes(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from None
    if is_directory:
        overrides = [*_workspace_override(path, text), *(overrides or [])]
    return parse_recipe(text, overrides, str(path), checks)


def parse_recipe(
    text: str, overrides: list[str] | None = None, origin: str = "recipe", checks: Iterable[Check] = ()
) -> Recipe:
    """The same as ``load_recipe``, from the text of a YAML file."""
    read, lines = read_yaml(text, origin)
    values = {} if read is None else read
    if not isinstance(values, dict):
        raise UsageError(f"{origin} must be a mapping with keys such as {', '.join(list(Recipe.model_fields)[:5])}")
    places: Places = dict(lines)
    # A preset removes the shape that it replaces, so it goes before the overrides of single fields.
    for override in sorted(overrides or [], key=lambda text: not text.startswith("model.preset=")):
        places = override_place(places, _apply_override(values, override), override)
    if problems := find_problems(values, places, checks):
        raise RecipeError(origin, sorted(problems, key=lambda problem: problem.line or math.inf))
    return Recipe.model_validate(values)


def load_recipe_or_preset(target: str, overrides: list[str] | None = None) -> Recipe:
    """A recipe file, the name of a recipe that ships with zero2all, or the recipe of a preset (``recipe_for_model``).

    The vocabulary has its size already, so that the model can be looked at and measured without a tokenizer.
    """
    if target in PRESETS:
        return recipe_for_model(ModelConfig(preset=target), overrides, target)
    path = Path(target) if Path(target).exists() else builtin_recipe_path(f"{target}.yaml")
    if not path.exists():
        raise UsageError(f"{target} is no recipe and no preset; presets: {', '.join(PRESETS)}")
    return with_vocab_size(load_recipe(path, overrides))


def recipe_for_model(config: ModelConfig, overrides: list[str] | None = None, origin: str = "recipe") -> Recipe:
    """The recipe that trains a model on two sequences of its full context per step."""
    context = config.max_position_embeddings
    train = {"epochs": 1, "seq_len": context, "batch_tokens": 2 * context}
    # By default the vocabulary may be smaller than a tokenizer's, although nobody asked for that.
    model = config.model_dump(mode="json", exclude_defaults=True, exclude={"vocab_size"})
    recipe = parse_recipe(yaml.safe_dump({"model": model, "train": train}), overrides, origin)
    return with_vocab_size(recipe, config.vocab_size)


def with_vocab_size(recipe: Recipe, default: int | None = None) -> Recipe:
    """Fill in a missing vocabulary size: with the default, or from the tokenizer to train."""
    size = recipe.model.vocab_size or default or recipe.tokenizer.vocab_size
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": size})})


def recipe_yaml(recipe: Recipe) -> str:
    """The fully resolved recipe; loading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recipe_schema() -> str:
    """JSON Schema, for editors that complete and check YAML."""
    return json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False)


def _apply_override(values: dict[str, Any], override: str) -> KeyPath:
    """Set the value, and return the path of all that is new: its key, or a section that did not exist."""
    dotted, equals, raw = override.partition("=")
    keys = dotted.strip().split(".")
    shown = shorten(override)
    if not equals or not all(keys) or len(keys) > MAX_DEPTH:
        raise UsageError(f"{shown!r} is not an override: write section.key=value, such as train.steps=200")
    try:
        value, _ = read_yaml(raw, f"the value of {shown!r}")
    except UsageError as error:
        raise UsageError(f"{error}; put quotes around a value that is text") from None
    section = values
    new = len(keys)
    for depth, key in enumerate(keys[:-1], 1):
        if not isinstance(section.get(key), dict):
            section[key] = {}
            new = min(new, depth)
        section = section[key]
    if keys[:-1] == ["train"] and keys[-1] in LENGTH_KEYS and value is not None:
        # A length on the command line takes the place of the one in the file, whatever its unit.
        for other in LENGTH_KEYS:
            section.pop(other, None)
    if keys == ["model", "preset"]:
        # Likewise a shape: a resolved recipe spells out every field of the old one, and what the new one adds.
        own_fields = (PRESETS.get(str(name), {}) for name in (section.get("preset"), value))
        for field in SHAPE_FIELDS.union(*own_fields):
            section.pop(field, None)
    section[keys[-1]] = value
    return tuple(keys[:new])


def builtin_recipe_path(name: str) -> Path:
    """A file of ``recipes/``, which ships with the package: inside it when installed, else at the top of a checkout."""
    package = Path(__file__).parents[1]
    places = [package / "recipes" / name, package.parents[1] / "recipes" / name]
    return next((place for place in places if place.exists()), places[0])


def _stored_recipe_path(directory: Path) -> Path:
    """The recipe of an output or run directory."""
    for path in (directory / RECIPE_FILE, directory / DEFAULT_RUN / RECIPE_FILE):
        if path.is_file():
            return path
    where = f"{directory} is a directory with neither {RECIPE_FILE} nor {DEFAULT_RUN}/{RECIPE_FILE}"
    if below := find_runs_below(directory):
        raise UsageError(f"{where}; give one of the runs below it: {', '.join(map(str, below))}")
    raise UsageError(f"{where}, so it does not belong to a run; give a recipe file{_sibling_recipes(directory / '?')}")


def _workspace_override(path: Path, text: str) -> list[str]:
    """The recipe of a run means the workspace that the run is in now, not the one where it was stored."""
    name = parse_recipe(text, origin=str(path)).run
    for run in (path.parent, path.parent / name):
        if (run / IDENTITY_FILE).exists():
            return [f"out={json.dumps(str(workspace_of(run, name)))}"]
    return []


def _sibling_recipes(path: Path) -> str:
    """The recipes beside a path where there is none, or those in ``recipes/`` there."""
    for folder in (path.parent, path.parent / "recipes"):
        if names := sorted(p.name for p in folder.glob("[!.]*.y*ml")):
            return f"; in {folder}/ there are {', '.join(names)}"
    return ""
