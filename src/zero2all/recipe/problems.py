"""Everything that is wrong with the values of a recipe, at once, and nothing that nobody wrote.

A value that is invalid is taken out, and a rule that reads it is not reported: with a default in its place the rule
would be about a value that is not in the recipe.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zero2all.base.errors import RecipeProblem
from zero2all.base.redact import redact
from zero2all.recipe.model import PRESETS
from zero2all.recipe.safe_yaml import KeyPath
from zero2all.recipe.sections import Recipe
from zero2all.recipe.types import COLLECT_MISTAKES, Mistake, Section

MAX_SHOWN_CHARS = 80  # characters of a wrong value or an override in a message
Places = dict[KeyPath, int | str]
"""The line of each key and element in the file, or the override that gave it."""
Check = Callable[[Recipe], Iterable[Mistake]]
"""A check of more than the recipe itself, such as the files that it names."""


def override_place(places: Places, path: KeyPath, override: str) -> Places:
    """The places with an override at ``path``: what the file has there no longer counts."""
    return {other: place for other, place in places.items() if other[: len(path)] != path} | {path: shorten(override)}


def locate(places: Places, path: KeyPath) -> int | str | None:
    """The place of a value, or of the nearest section around it that has one."""
    return next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), None)


def shorten(text: str) -> str:
    """For a message. Secrets go first: half of one would not be recognized."""
    text = redact(text)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def located_problem(path: KeyPath, message: str, hint: str = "", place: int | str | None = None) -> RecipeProblem:
    dotted = ".".join(map(str, path)) or "recipe"
    if isinstance(place, str):
        return RecipeProblem(dotted, message, hint, override=place)
    return RecipeProblem(dotted, message, hint, place)


def find_problems(values: dict[str, Any], places: Places, checks: Iterable[Check] = ()) -> list[RecipeProblem]:
    """The mistakes in the values of a recipe: keys, single values, rules over several, and ``checks``."""
    remaining = copy.deepcopy(values)
    problems, invalid = _take_out_invalid(remaining, places)
    try:
        recipe = Recipe.model_validate(remaining, context=COLLECT_MISTAKES)
    except ValidationError:  # a mistake that cannot be taken out hides the rules
        return problems
    checked: list[tuple[KeyPath, Mistake]] = [((), mistake) for check in checks for mistake in check(recipe)]
    for section, mistake in (*_section_mistakes(recipe), *checked):
        keys = [section + _to_path(key) for key in mistake.keys]
        if not any(key[: len(path)] == path for key in keys for path in invalid):
            given = [key for key in keys if _is_given(values, key)] or keys
            found = [locate(places, key) for key in given]
            # What is on the command line was added to a file that was right before.
            place = next((one for one in found if isinstance(one, str)), found[0])
            problems.append(located_problem(keys[0] if len(keys) == 1 else section, mistake.message, place=place))
    return problems


def _take_out_invalid(values: dict[str, Any], places: Places) -> tuple[list[RecipeProblem], list[KeyPath]]:
    """Remove every value that is wrong by itself. Returns the problems, and the keys whose values are now unknown."""
    problems: list[RecipeProblem] = []
    invalid: list[KeyPath] = []
    while errors := _validation_errors(values):
        removed = []
        for path, details in _by_value(values, errors).items():
            is_missing = details[0]["type"] == "missing"
            if not (is_missing and path in invalid):
                problems.append(_invalid_value_problem(path, details, places))
            if taken := _remove(values, path[:-1] if is_missing else path):
                removed.append(taken)
                if details[0]["type"] == "extra_forbidden":
                    invalid += suggested_keys(path)
        if not removed:
            break
        invalid += removed
    if ("model", "preset") in invalid:
        own = values.get("model", {})
        invalid += [("model", name) for shape in PRESETS.values() for name in shape if name not in own]
    return problems, invalid


def _validation_errors(values: dict[str, Any]) -> list[ErrorDetails]:
    try:
        Recipe.model_validate(values, context=COLLECT_MISTAKES)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _by_value(values: dict[str, Any], errors: list[ErrorDetails]) -> dict[KeyPath, list[ErrorDetails]]:
    """The errors of each value: one that may be of several types has an error for each."""
    grouped: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        location = error["loc"]
        path = location if error["type"] == "missing" else _existing(values, location)
        grouped.setdefault(path, []).append(error)
    return grouped


def _existing(values: Any, location: KeyPath) -> KeyPath:
    """Without what pydantic appends for the members of a union, such as ``literal['auto']``."""
    for depth, key in enumerate(location):
        if not _has(values, key):
            return location[:depth]
        values = values[key]
    return location


def _has(values: Any, key: str | int) -> bool:
    return key in values if isinstance(values, dict) else isinstance(values, list) and key in range(len(values))


def _is_given(values: Any, path: KeyPath) -> bool:
    return _existing(values, path) == path


def _remove(values: dict[str, Any], path: KeyPath) -> KeyPath | None:
    """Take a value out, and return the path of what was taken; None if there is nothing at ``path``."""
    if not path or not _is_given(values, path):
        return None
    parent: Any = values
    for key in path[:-1]:
        parent = parent[key]
    if isinstance(parent, list):  # one element less may be a mistake of its own, so the whole list goes
        return _remove(values, path[:-1])
    del parent[path[-1]]
    return path


def _invalid_value_problem(path: KeyPath, details: list[ErrorDetails], places: Places) -> RecipeProblem:
    first = details[0]
    message = ", or ".join(
        dict.fromkeys(str(detail["msg"]).removeprefix("Value error, ") for detail in details)
    ).replace(", or Input should be ", ", or ")
    hint = ""
    if first["type"] == "extra_forbidden":
        message = "no such key"
        close = [str(key[-1]) if key[:-1] == path[:-1] else ".".join(map(str, key)) for key in suggested_keys(path)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known_keys(path[:-1]))}"
    elif first["type"] == "missing":
        message = "is required"
    elif not isinstance(first["input"], dict | list | BaseModel) and repr(first["input"]) not in message:
        message = f"{message}; it is {shorten(repr(first['input']))}"
    return located_problem(path, message, hint, locate(places, path))


def _section_mistakes(section: Section, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Mistake]]:
    """The broken rules of a section and of all sections in it, each with the path of its section."""
    for name, value in section:
        if isinstance(value, Section):
            yield from _section_mistakes(value, (*path, name))
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, Section):
                    yield from _section_mistakes(one, (*path, name, index))
    for mistake in section.mistakes():
        yield path, mistake


def suggested_keys(path: KeyPath) -> list[KeyPath]:
    """The known keys that a wrong one may mean: much like one beside it, the same or much like one elsewhere, or a
    little like one beside it. Several if a name is in several sections."""
    *section, name = path
    beside = partial(difflib.get_close_matches, str(name), known_keys(path[:-1]), 1)
    names = {key[-1] for key in _all_keys(Recipe)}
    if close := beside(cutoff=0.7):
        return [(*section, close[0])]
    if elsewhere := difflib.get_close_matches(str(name), names, 1, cutoff=0.8):
        return [key for key in _all_keys(Recipe) if key[-1] == elsewhere[0]]
    return [(*section, close) for close in beside(cutoff=0.6)]


@cache
def _all_keys(kind: type[BaseModel]) -> list[tuple[str, ...]]:
    """Every key of a section and of the sections in it, without the keys of list elements."""
    keys: list[tuple[str, ...]] = []
    for name, field in kind.model_fields.items():
        keys.append((name,))
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section) and get_origin(field.annotation) is not list:
                keys += [(name, *key) for key in _all_keys(part)]
    return keys


def known_keys(path: KeyPath) -> list[str]:
    """The keys that a section knows, found by walking the types along a path."""
    kind: Any = Recipe
    for key in path:
        if isinstance(key, int) or not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            continue
        kind = kind.model_fields[key].annotation
        while get_origin(kind) in (list, UnionType):
            kind = get_args(kind)[0]
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _to_path(dotted: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
