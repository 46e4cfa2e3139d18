"""The test of each recipe key: a file below tests/ that sets it.

A test sets a key if it has

- the full path in a string, such as ``"train.guard.threshold=1e9"``,
- a section as YAML in a string, such as ``"train.guard={threshold: 5}"`` or ``"train: {guard: {threshold: 5}}"``,
- a section as a dict, such as ``{"train": {"guard": {"threshold": 5}}}`` or ``GuardRecipe.model_validate({...})``, or
- a section as a call, such as ``GuardRecipe(threshold=5)``, or as an argument or value of its name with no other keys,
  such as ``guard={"threshold": 5}``, or
- in the tests of its package or of training, a name with an underscore that no other section has, as an argument or
  the key of a dict.

Other names alone never count: many are common words.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from reference_generator.recipe_keys import keys, section_in, sections
from zero2all.recipe import Recipe
from zero2all.recipe.types import Section

TESTS = Path(__file__).parents[2] / "tests"
KEY_TESTS = Path(__file__).with_name("key_tests.json")
OVERRIDE = re.compile(r"([a-z_]\w*(?:\.[a-z_]\w*)*)=(.*)", re.DOTALL)
DOTTED = re.compile(r"(?<![\w.])[a-z_]\w*(?:\.[a-z_]\w*)+(?![\w(]|\.\w)")
ALL_SECTIONS = [("", Recipe), *sections(Recipe, "")]
PATHS = {key.path for path, section in ALL_SECTIONS for key in keys(section, path)}
VALUE_PATHS = [key.path for path, section in ALL_SECTIONS for key in keys(section, path) if not section_in(key.hint)]
PLACES: dict[str, list[str]] = {}
"""Where each section is in a recipe, by the name of its class."""
for _path, _section in ALL_SECTIONS:
    PLACES.setdefault(_section.__name__, []).append(_path)


SECTIONS: dict[str, list[tuple[str, type[Section]]]] = {}
"""Sections by their name."""
for _path, _section in ALL_SECTIONS[1:]:
    SECTIONS.setdefault(_path.rpartition(".")[2], []).append((_path, _section))
OWN_NAMES: dict[str, list[str]] = {}
"""Keys by their name, if it has an underscore and only one section has it."""
for _path, _section in ALL_SECTIONS:
    for _key in keys(_section, _path):
        _name = _key.path.rpartition(".")[2]
        if "_" in _name and sum(_name in one.model_fields for one in {one for _, one in ALL_SECTIONS}) == 1:
            OWN_NAMES.setdefault(_name, []).append(_key.path)


@functools.cache
def key_tests() -> dict[str, str]:
    """The test file of each key that has one: the recorded one while it sets the key, so that the page seldom changes.

    Otherwise the first one, those of the key's own package before others.
    """
    recorded = json.loads(KEY_TESTS.read_text("utf-8")) if KEY_TESTS.exists() else {}
    by_key: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        name = file.relative_to(TESTS).as_posix()
        for key in keys_set_in(file.read_text("utf-8"), name.partition("/")[0]):
            by_key.setdefault(key, []).append(name)
    return {
        key: recorded[key] if recorded.get(key) in files else min(files, key=functools.partial(_preference, key))
        for key in VALUE_PATHS
        if (files := by_key.get(key))
    }


def _preference(key: str, file: str) -> tuple[bool, str]:
    return not file.startswith(f"{key.partition('.')[0]}/"), file


def keys_set_in(text: str, package: str = "") -> set[str]:
    """The keys that a test file of a package sets.

    >>> sorted(keys_set_in('tiny_recipe("seed=5", "train.guard={window: 32}"); DPORecipe(beta=0.5); "threshold"'))
    ['seed', 'train.guard', 'train.guard.window', 'train.objective.dpo.beta']
    """
    found: set[str] = set()
    names: set[Any] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword):
            names.add(node.arg)
            found.update(_in_section(node.arg, node.value))
        elif isinstance(node, ast.Call):
            found.update(_in_call(node))
        elif isinstance(node, ast.Dict):
            found.update(_in_mapping(_literal(node), ""))
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    names.add(key.value)
                    found.update(_in_section(key.value, value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(_in_string(node.value))
        elif isinstance(node, ast.JoinedStr):
            found.update(_in_string(_joined(node)))
    alone = (path for name in names.intersection(OWN_NAMES) for path in OWN_NAMES[name])
    return found.union(path for path in alone if package in (path.partition(".")[0], "train"))


def _in_section(name: Any, value: ast.expr) -> Iterator[str]:
    given = _literal(value)
    for path, section in SECTIONS.get(name, []):
        if isinstance(given, dict) and set(given) <= set(section.model_fields):
            yield from _in_mapping(given, path, is_section=True)


def _in_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func).rpartition(".")
    owner, words = (name[0].rpartition(".")[2], node.args) if name[2] == "model_validate" else (name[2], [])
    for place in PLACES.get(owner, []) if owner != "Recipe" else []:
        given = {word.arg: _literal(word.value) for word in node.keywords if word.arg}
        for mapping in (given, *map(_literal, words)):
            yield from _in_mapping(mapping, place, is_section=True)
    if "recipe" in name[2]:  # keys of the top level have no dot, and are common words elsewhere
        for argument in node.args:
            text = _joined(argument) if isinstance(argument, ast.JoinedStr) else _literal(argument)
            if isinstance(text, str) and (match := OVERRIDE.match(text)) and match[1] in PATHS:
                yield match[1]


def _in_string(text: str) -> Iterator[str]:
    text = text.replace("\\.", ".")
    yield from PATHS.intersection(DOTTED.findall(text))
    if (match := OVERRIDE.fullmatch(text)) and match[2].startswith(("{", "[")) and match[1] in PATHS:
        yield from _in_value(_yaml(match[2]), match[1])
    elif re.search(r"^(\{ *)?[a-z]+: *", text, re.MULTILINE):
        yield from _in_mapping(_yaml(text), "")


def _in_mapping(value: Any, place: str, is_section: bool = False) -> Iterator[str]:
    """The keys of a mapping that is a section at ``place``; at the top level only if it has no other keys."""
    if not isinstance(value, dict) or (not is_section and not set(value) <= set(Recipe.model_fields)):
        return
    for name, inner in value.items():
        path = f"{place}.{name}" if place else str(name)
        if path in PATHS:
            yield path
            yield from _in_value(inner, path)


def _in_value(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _in_mapping(one, f"{path}[]", is_section=True)
    yield from _in_mapping(value, path, is_section=True)


def _yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return None


def _joined(node: ast.JoinedStr) -> str:
    """An f-string with a word in place of each value."""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)


def _literal(node: ast.AST) -> Any:
    """A dict, list or string of the source; None in place of what is computed, and of what ``**`` adds."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key): _literal(value) for key, value in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.List):
        return [_literal(one) for one in node.elts]
    return node.value if isinstance(node, ast.Constant) else None
