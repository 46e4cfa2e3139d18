"""The recipe page: every key of every section, from the types and their docstrings."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

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
editors. [File formats](formats-data.md#recipe) describes the syntax.

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


def recipe_page() -> str:
    parts = [
        RECIPE_INTRODUCTION.format(count=len(VALUE_PATHS), untested=untested_text()),
        "## Types",
        table(["Type", "Values"], ((f"`{name}`", text) for name, text in TYPE_ROWS)),
        "## Top level",
        first_paragraph(Recipe.__doc__),
        key_table(Recipe, ""),
    ]
    for path, section in sections(Recipe, ""):
        parts += [f"{'##' if '.' not in path else '###'} `{path}`", *paragraphs(section.__doc__ or "")]
        parts.append(key_table(section, path))
        if section is ModelConfig:
            parts += ["### Presets of `model.preset`", preset_table()]
    return page("Recipe reference", *parts)


def untested_text() -> str:
    untested = [f"`{path}`" for path in VALUE_PATHS if path not in key_tests()]
    return f"No test sets {', '.join(untested)}." if untested else "A test sets each of them."


def key_table(section: type[Section], prefix: str) -> str:
    rows = (
        (
            f"`{key.path}`",
            type_text(key),
            default_text(key),
            key_versions()[key.path],
            test_text(key.path),
            prose(key.info.description or ""),
        )
        for key in keys(section, prefix)
    )
    return table(["Key", "Type", "Default", "Since", "Tested in", "Description"], rows)


def test_text(path: str) -> str:
    if path not in VALUE_PATHS:
        return ""  # a section
    return f"`{key_tests()[path]}`" if path in key_tests() else "no test"


def type_text(key: Key) -> str:
    if not (section := section_in(key.hint)):
        return hint_text(key.hint, key.info.metadata)
    if get_origin(key.hint) is list:
        return f"list of {heading_link(key.path + '[]')}"
    if key.hint is section:
        return f"section {heading_link(key.path)}"
    *others, last = (hint_text(part) for part in get_args(key.hint) if part is not section)
    return f"{', '.join([f'section {heading_link(key.path)}', *others])} or {last}"


def hint_text(hint: Any, metadata: Iterable[Any] = ()) -> str:
    """A type in words; the metadata of a field hold its bounds."""
    *others, last = alternatives(hint, metadata)
    return f"{', '.join(others)} or {last}" if others else last


def alternatives(hint: Any, metadata: Iterable[Any] = ()) -> list[str]:
    for alias, name in NAMED_TYPES:
        if hint == alias:
            return [name]
    if hint is type(None):
        return ["`null`"]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], PluginName):
        return [*(f"`{name}`" for name in builtin_names(parts[1].kind)), "plugin"]
    if origin is Annotated:
        return alternatives(parts[0], parts[1:])
    if origin is Literal:
        return [f"`{value}`" for value in parts]
    if origin in (Union, types.UnionType):
        return [text for part in parts for text in alternatives(part, metadata)]
    if origin is list or (origin is tuple and parts[-1] is Ellipsis):
        inner = hint_text(parts[0])
        return [f"list of ({inner})" if " or " in inner else f"list of {inner}"]
    if origin is tuple:
        return [f"list of {len(parts)}: {hint_text(parts[0])}"]
    if origin is dict:
        return ["mapping" if parts[1] is Any else f"mapping of {hint_text(parts[0])} to {hint_text(parts[1])}"]
    return [" ".join([PLAIN_TYPES[hint], bounds_text(metadata)]).rstrip()]


def bounds_text(metadata: Iterable[Any]) -> str:
    flat = [one for given in metadata for one in (given.metadata if isinstance(given, FieldInfo) else [given])]
    bounds = [
        f"{sign} {'2^63' if limit == 2**63 else f'{limit:g}'}"
        for one in flat
        for name, sign in BOUNDS.items()
        if (limit := getattr(one, name, None)) is not None
    ]
    return " and ".join(bounds)


def default_text(key: Key) -> str:
    default = key.info.default
    if key.info.is_required():
        return "required"
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


def preset_table() -> str:
    names = list(dict.fromkeys(name for shape in PRESETS.values() for name in shape))
    rows = []
    for preset, shape in PRESETS.items():
        values = ModelConfig(preset=preset).model_dump() | {"moe": shape.get("moe")}  # a section: only what is given
        rows.append([f"`{preset}`", *(f"`{value_text(values[name])}`" for name in names)])
    return table(["Preset", *(f"`{name}`" for name in names)], rows)
