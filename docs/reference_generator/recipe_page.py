"""The recipe page: every key of every section, from the types and their docstrings."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from reference_generator.catalogue import Say, english
from reference_generator.key_tests import VALUE_PATHS, key_tests
from reference_generator.markdown import first_paragraph, heading_link, page, paragraphs, prose, table, value_text
from reference_generator.recipe_keys import Key, keys, section_in, sections
from zero2all import __version__
from zero2all.base.plugins import builtin_names
from zero2all.recipe import PRESETS, ModelConfig, Recipe
from zero2all.recipe.types import AnyDir, Bytes, Count, DurationField, InputPath, LocalDir, PluginName, Section, Slug

KEY_VERSIONS = Path(__file__).with_name("key_versions.json")
THIS_VERSION = __version__.partition(".dev")[0]
NAMED_TYPES = [
    (Count, "count"),
    (Bytes, "size"),
    (DurationField, "duration"),
    (Slug, "name"),
    (LocalDir, "path"),
    (AnyDir, "path or URL"),
    (InputPath, "path or URL"),
]
PLAIN_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
RECIPE_INTRODUCTION = """\
A recipe is a YAML file. Every key has a default unless it is marked as required. Overrides on the command line replace
values from the file: `z2a train my.yaml train.steps=200`. A list is replaced as a whole. `z2a recipe check` validates a
recipe, `z2a recipe show` prints it with all defaults filled in, and `z2a recipe schema` prints the JSON Schema for
editors.

`[]` in a path stands for an element of a list: `corpus.sources[].name` is the name of a source. *Since* is the version
that introduced the key under this name. A recipe with an earlier name fails, and the error suggests the new one.
*Tested in* is a file of `tests/` that sets the key: one of several, found by `docs/reference_generator/key_tests.py`.

There are {count} keys. {untested}"""
TYPE_ROWS = [
    ("count", "An integer, optionally with a suffix: `4096`, `64Ki`, `10M`, `1.1B`."),
    ("size", "A number of bytes: `4096`, `200MB`, `2GiB`."),
    (
        "duration",
        "A number of steps, tokens or epochs: `100 steps`, `2M tokens`, `0.5 epochs`. A plain number means steps.",
    ),
    ("name", "Letters, digits, `_` and `-`; the first character is not `-`."),
    ("path", "A local file or directory, relative to the working directory."),
    ("plugin", "The name of an installed plugin, or `module:Name`."),
    ("path or URL", "The same, or a path in an object store such as `s3://bucket/documents`."),
]


def recipe_page(say: Say = english) -> str:
    parts = [
        say(RECIPE_INTRODUCTION).format(count=len(VALUE_PATHS), untested=untested_text(say)),
        f"## {say('Types')}",
        table([say("Type"), say("Values")], ((f"`{say(name)}`", say(text)) for name, text in TYPE_ROWS)),
        '<a id="top-level"></a>' if say is not english else "",  # python.md, which is English, links to it
        f"## {say('Top level')}",
        say(first_paragraph(Recipe.__doc__)),
        key_table(Recipe, "", say),
    ]
    for path, section in sections(Recipe, ""):
        parts += [f"{'##' if '.' not in path else '###'} `{path}`", *map(say, paragraphs(section.__doc__ or ""))]
        parts.append(key_table(section, path, say))
        if section is ModelConfig:
            parts += [f"### {say('Presets of `model.preset`')}", preset_table(say)]
    return page(say("Recipe reference"), *parts, chinese=say is not english)


def untested_text(say: Say) -> str:
    untested = [f"`{path}`" for path in VALUE_PATHS if path not in key_tests()]
    none, some = say("A test sets each of them."), say("No test sets {}.")
    return some.format(", ".join(untested)) if untested else none


def key_table(section: type[Section], prefix: str, say: Say) -> str:
    rows = (
        (
            f"`{key.path}`",
            type_text(key, say),
            default_text(key, say),
            key_versions()[key.path],
            test_text(key.path, say),
            say(prose(key.info.description or "")),
        )
        for key in keys(section, prefix)
    )
    return table(list(map(say, ["Key", "Type", "Default", "Since", "Tested in", "Description"])), rows)


def test_text(path: str, say: Say) -> str:
    if path not in VALUE_PATHS:
        return ""  # a section
    return f"`{key_tests()[path]}`" if path in key_tests() else say("no test")


def type_text(key: Key, say: Say) -> str:
    if not (section := section_in(key.hint)):
        return hint_text(key.hint, say, key.info.metadata)
    if get_origin(key.hint) is list:
        return say("list of {}").format(heading_link(key.path + "[]"))
    this = say("section {}").format(heading_link(key.path))
    others = [hint_text(part, say) for part in get_args(key.hint) if part is not section]
    return one_of([this, *(others if key.hint is not section else [])], say)


def one_of(choices: list[str], say: Say) -> str:
    *others, last = choices
    text = say("{} or {}").format(say(", ").join(others), last) if others else last
    return re.sub(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])", "", text)  # a space between Chinese words is a typo


def hint_text(hint: Any, say: Say = english, metadata: Iterable[Any] = ()) -> str:
    """A type in words; the metadata of a field hold its bounds."""
    return one_of(alternatives(hint, say, metadata), say)


def alternatives(hint: Any, say: Say, metadata: Iterable[Any] = ()) -> list[str]:
    for alias, name in NAMED_TYPES:
        if hint == alias:
            return [say(name)]
    if hint is type(None):
        return ["`null`"]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], PluginName):
        return [*(f"`{name}`" for name in builtin_names(parts[1].kind)), say("plugin")]
    if origin is Annotated:
        return alternatives(parts[0], say, parts[1:])
    if origin is Literal:
        return [f"`{value}`" for value in parts]
    if origin in (Union, types.UnionType):
        return [text for part in parts for text in alternatives(part, say, metadata)]
    if origin is list or (origin is tuple and parts[-1] is Ellipsis):
        inner = hint_text(parts[0], say)
        return [say("list of {}").format(f"({inner})" if " or " in hint_text(parts[0]) else inner)]
    if origin is tuple:
        return [say("list of {}: {}").format(len(parts), hint_text(parts[0], say))]
    if origin is dict:
        kinds = [hint_text(part, say) for part in parts if part is not Any]
        return [say("mapping") if len(kinds) < 2 else say("mapping of {} to {}").format(*kinds)]
    return [" ".join([say(PLAIN_TYPES[hint]), bounds_text(metadata, say)]).rstrip()]


def bounds_text(metadata: Iterable[Any], say: Say) -> str:
    flat = [one for given in metadata for one in (given.metadata if isinstance(given, FieldInfo) else [given])]
    bounds = [
        f"{sign} {'2^63' if limit == 2**63 else f'{limit:g}'}"
        for one in flat
        for name, sign in BOUNDS.items()
        if (limit := getattr(one, name, None)) is not None
    ]
    return say(" and ").join(bounds)


def default_text(key: Key, say: Say) -> str:
    default = key.info.default
    if key.info.is_required():
        return say("required")
    if isinstance(default, Section):
        given = default.model_dump(exclude_unset=True)
        return ", ".join(f"`{name}: {value_text(value)}`" for name, value in given.items())
    if key.hint == Bytes:
        return f"`{size_text(default)}`"
    return f"`{value_text(default)}`"


def size_text(size: int) -> str:
    units = {"GiB": 2**30, "GB": 10**9, "MB": 10**6}
    return next((f"{size // factor}{unit}" for unit, factor in units.items() if size % factor == 0), str(size))


@functools.cache
def key_versions() -> dict[str, str]:
    """The version that introduced each key: as recorded, or this version."""
    recorded = json.loads(KEY_VERSIONS.read_text("utf-8"))
    all_sections = [("", Recipe), *sections(Recipe, "")]
    paths = [key.path for prefix, section in all_sections for key in keys(section, prefix)]
    return {path: recorded.get(path, THIS_VERSION) for path in paths}


def preset_table(say: Say) -> str:
    names = list(dict.fromkeys(name for shape in PRESETS.values() for name in shape))
    rows = []
    for preset, shape in PRESETS.items():
        values = ModelConfig(preset=preset).model_dump() | {"moe": shape.get("moe")}  # a section: only what is given
        rows.append([f"`{preset}`", *(f"`{value_text(values[name])}`" for name in names)])
    return table([say("Preset"), *(f"`{name}`" for name in names)], rows)
