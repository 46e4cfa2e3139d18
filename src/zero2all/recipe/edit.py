"""Set keys in the text of a recipe, so that its comments and its order stay."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from zero2all.base.errors import UsageError
from zero2all.recipe.load import parse_recipe, recipe_yaml
from zero2all.recipe.safe_yaml import PlainLoader


def edit_recipe(text: str, overrides: Sequence[str], origin: str = "recipe") -> str:
    """The text of a recipe with overrides. Where it cannot be edited in place (a value behind an alias, a preset that
    replaces other keys), the fully resolved recipe without comments."""
    wanted = parse_recipe(text, list(overrides), origin)
    try:
        edited = text
        for override in overrides:
            key, _, value = override.partition("=")
            edited = _set_key(edited, key.strip().split("."), value.strip())
        is_same = parse_recipe(edited).model_dump() == wanted.model_dump()
    except (UsageError, yaml.YAMLError):
        is_same = False
    return edited if is_same else recipe_yaml(wanted)


def _set_key(text: str, keys: list[str], value: str) -> str:
    node: yaml.Node | None = yaml.compose(text, Loader=PlainLoader)
    if node is None:
        return f"{text}{_flow(keys, value)}\n"
    for depth, name in enumerate(keys):
        if not isinstance(node, yaml.MappingNode):  # a section without keys
            return _replace(text, node, f"{{{_flow(keys[depth:], value)}}}")
        inner = next((inner for key, inner in node.value if key.value == name), None)
        if inner is None:
            return _insert(text, node, _flow(keys[depth:], value))
        node = inner
    return _replace(text, node, value)


def _flow(keys: list[str], value: str) -> str:
    """A key and its value on one line.

    >>> _flow(["model", "ops", "attention"], "sdpa")
    'model: {ops: {attention: sdpa}}'
    """
    for key in reversed(keys[1:]):
        value = f"{{{key}: {value}}}"
    return f"{keys[0]}: {value}"


def _replace(text: str, node: yaml.Node, value: str) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    space = " " if begin == end else ""  # an empty value begins right after its colon
    return f"{text[:begin]}{space}{value}{text[end:]}"


def _insert(text: str, mapping: yaml.MappingNode, entry: str) -> str:
    """At the end of a mapping; after the comment of its last line."""
    if mapping.flow_style:
        begin = mapping.start_mark.index + 1
        return f"{text[:begin]}{entry}{', ' if mapping.value else ''}{text[begin:]}"
    last: yaml.Node = mapping
    while isinstance(last, yaml.CollectionNode) and not last.flow_style:
        last = last.value[-1] if isinstance(last, yaml.SequenceNode) else last.value[-1][1]
    line_end = text.find("\n", last.end_mark.index)
    line_end = len(text) if line_end < 0 else line_end
    indent = " " * mapping.value[0][0].start_mark.column
    return f"{text[:line_end]}\n{indent}{entry}{text[line_end:]}"
