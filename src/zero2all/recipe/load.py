"""From YAML and overrides to a Recipe, or to the list of everything that is wrong with it."""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from zero2all.errors import Problem, RecipeError, UsageError
from zero2all.recipe.presets import PRESETS
from zero2all.recipe.safe_yaml import DEEPEST, LARGEST, Place, read_yaml
from zero2all.recipe.sections import Recipe

SHOWN = 80  # characters of a wrong value in a message
_ONE_LENGTH = ("steps", "tokens", "epochs")


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe and lay ``section.key=value`` overrides over it."""
    path = Path(path)
    try:
        with open(path, "rb") as stream:  # which may be a pipe, and may have no end
            text = stream.read(LARGEST + 1).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"no recipe at {path}{_neighbours(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from None
    return parse_recipe(text, overrides, origin=str(path))


def parse_recipe(text: str, overrides: list[str] | None = None, origin: str = "recipe") -> Recipe:
    """The same from text."""
    read, lines = read_yaml(text, origin)
    values = {} if read is None else read
    if not isinstance(values, dict):
        raise UsageError(f"{origin} must be a mapping with keys such as {', '.join(list(Recipe.model_fields)[:5])}")
    for override in overrides or []:
        _apply_override(values, override)
    problems = _problems(values, lines)
    if problems:
        raise RecipeError(origin, problems)
    return Recipe.model_validate(values)


def recipe_or_preset(target: str, overrides: list[str] | None = None) -> Recipe:
    """A recipe file, or a preset by its name: the recipe that trains it on two sequences of its full context a step.

    The vocabulary has its size already, so that the model can be looked at and measured without a tokenizer.
    """
    if target in PRESETS:
        context = PRESETS[target]["context"]
        train = {"epochs": 1, "seq_len": context, "batch_tokens": 2 * context}
        recipe = parse_recipe(yaml.safe_dump({"model": {"preset": target}, "train": train}), overrides, origin=target)
    elif Path(target).exists():
        recipe = load_recipe(target, overrides)
    else:
        raise UsageError(f"{target} is no recipe and no preset; presets: {', '.join(PRESETS)}")
    size = recipe.model.vocab_size or recipe.tokenizer.vocab_size
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": size})})


def recipe_yaml(recipe: Recipe) -> str:
    """The fully resolved recipe; loading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recipe_schema() -> str:
    """JSON Schema, for editors that complete and check YAML."""
    return json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False)


def _apply_override(values: dict[str, Any], override: str) -> None:
    dotted, equals, raw = override.partition("=")
    keys = dotted.strip().split(".")
    shown = override if len(override) <= SHOWN else override[:SHOWN] + "..."
    if not equals or not all(keys) or len(keys) > DEEPEST:
        raise UsageError(f"{shown!r} is not an override: write section.key=value, such as train.steps=200")
    try:
        value, _ = read_yaml(raw, f"the value of {shown!r}")
    except UsageError as error:
        raise UsageError(f"{error}; put quotes around a value that is text") from None
    section = values
    for key in keys[:-1]:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    if keys[:-1] == ["train"] and keys[-1] in _ONE_LENGTH:
        # A length on the command line takes the place of the one in the file, whatever its unit.
        for other in _ONE_LENGTH:
            section.pop(other, None)
    if keys == ["model", "preset"]:
        # Likewise a shape: a resolved recipe spells out every field of the old one.
        for field in {name for shape in PRESETS.values() for name in shape}:
            section.pop(field, None)
    section[keys[-1]] = value


def _problems(values: dict[str, Any], lines: dict[Place, int]) -> list[Problem]:
    """Validate, take out what is wrong, and validate again: mistakes that hid behind others show too."""
    values = copy.deepcopy(values)
    found: list[Problem] = []
    removed_places: set[Place] = set()
    while True:
        try:
            Recipe.model_validate(values)
            return found
        except ValidationError as error:
            removed = False
            for detail in error.errors(include_url=False):
                place: Place = detail["loc"]
                problem = _problem(detail, lines)
                if problem not in found and not (detail["type"] == "missing" and place in removed_places):
                    found.append(problem)
                if _remove(values, place, detail["type"]):
                    removed_places.add(place)
                    removed = True
            if not removed:
                return found


def _remove(values: dict[str, Any], place: Place, kind: str) -> bool:
    """Take the offending value out, so that its default stands in. A missing value or a rule over several has none."""
    if kind == "missing" or not place:
        return False
    parent: Any = values
    for key in place[:-1]:
        try:
            parent = parent[key]
        except (KeyError, IndexError, TypeError):
            return False
    if isinstance(parent, dict) and place[-1] in parent:
        if place[:-1] == ("train",) and place[-1] in _ONE_LENGTH:
            parent[place[-1]] = 1  # without any length a second mistake would show that nobody made
        else:
            del parent[place[-1]]
        return True
    # One element less may be a mistake of its own, so the whole list goes.
    return isinstance(parent, list) and _remove(values, place[:-1], kind)


def _problem(detail: Any, lines: dict[Place, int]) -> Problem:
    place: Place = detail["loc"]
    message = str(detail["msg"]).removeprefix("Value error, ")
    hint = ""
    if detail["type"] == "extra_forbidden":
        message = "no such key"
        known = _fields_at(place[:-1])
        close = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    elif detail["type"] == "missing":
        message = "is required"
    elif not isinstance(detail["input"], dict | list | BaseModel) and repr(detail["input"]) not in message:
        given = repr(detail["input"])
        message = f"{message}; it is {given if len(given) <= SHOWN else given[:SHOWN] + '...'}"
    line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), None)
    return Problem(".".join(map(str, place)) or "recipe", message, hint, line)


def _fields_at(place: Place) -> list[str]:
    """The keys that a section knows, found by walking the types along a path."""
    kind: Any = Recipe
    for key in place:
        if isinstance(key, int) or not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            continue
        kind = kind.model_fields[key].annotation
        while get_origin(kind) in (list, UnionType):
            kind = get_args(kind)[0]
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def builtin(name: str) -> Path:
    """A file of ``recipes/``, which ships with the package: inside it when installed, else at the top of a checkout."""
    package = Path(__file__).parents[1]
    places = [package / "recipes" / name, package.parents[1] / "recipes" / name]
    return next((place for place in places if place.exists()), places[0])


def _neighbours(path: Path) -> str:
    folder = path.parent
    names = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    return f"; in {folder}/ there are {', '.join(names)}" if names else ""
