"""YAML for recipes and suites of probes: plain values only, within limits, and nothing that reads as something else
than it looks like.

PyYAML follows YAML 1.1, where ``12:30:45`` is 45045, ``012`` is 10, ``no`` is false and of two equal keys the last one
counts. Here such scalars are text (a field that wants a number then says so), equal keys are an error, and so are
aliases or nesting without end.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from zero2all.base.errors import UsageError

MAX_FILE_BYTES = 2**20  # bytes of a file
MAX_DEPTH = 64  # levels of lists and mappings
MAX_VALUES = 50_000  # values, each alias counted with all that it stands for
MAX_DIGITS = 40
KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, int]
"""The line of each key and element."""
_TAG = "tag:yaml.org,2002:"


class PlainLoader(yaml.SafeLoader):
    """Text, numbers, true, false, null, lists, mappings and ``<<``."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._level += 1
        if self._level > MAX_DEPTH:
            raise _error(f"nested more than {MAX_DEPTH} levels deep", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1


for _tag, _first, _pattern in (
    ("null", ["~", "n", "N", ""], r"~|null|Null|NULL|"),
    ("bool", list("tTfF"), r"true|True|TRUE|false|False|FALSE"),
    ("int", list("-+0123456789"), r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+"),
    (
        "float",
        list("-+.0123456789"),
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.nan",
    ),
    ("merge", ["<"], "<<"),
):
    PlainLoader.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(loader: PlainLoader, node: yaml.ScalarNode) -> int:
    text = str(node.value).replace("_", "")
    if len(text) > MAX_DIGITS:
        raise _error(f"a number of {len(text)} digits", node.start_mark)
    try:
        return int(text, 16 if text.lower().startswith("0x") else 10)
    except ValueError:
        raise _error(f"{text!r} is not an integer", node.start_mark) from None


def _float(loader: PlainLoader, node: yaml.ScalarNode) -> float:
    text = str(node.value).replace("_", "").lower()
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise _error(f"{text[:MAX_DIGITS]!r} is not a number", node.start_mark) from None


def _boolean(loader: PlainLoader, node: yaml.ScalarNode) -> bool:
    text = str(node.value).lower()
    if text not in ("true", "false"):
        raise _error(f"{text[:MAX_DIGITS]!r} is neither true nor false", node.start_mark)
    return text == "true"


def _unknown(loader: PlainLoader, node: yaml.Node) -> Any:
    raise _error(f"the tag {node.tag[:MAX_DIGITS]} has no meaning here", node.start_mark)


PlainLoader.yaml_constructors = {
    tag: maker
    for tag, maker in yaml.SafeLoader.yaml_constructors.items()
    if tag in [_TAG + known for known in ("null", "str", "seq", "map")]
}
PlainLoader.add_constructor(_TAG + "int", _integer)
PlainLoader.add_constructor(_TAG + "float", _float)
PlainLoader.add_constructor(_TAG + "bool", _boolean)
PlainLoader.add_constructor(None, _unknown)


def read_yaml(text: str, origin: str) -> tuple[Any, Lines]:
    """The values of a document, and the line of each key and element; a UsageError with the position if it is none."""
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(f"{origin} is larger than {MAX_FILE_BYTES >> 20} MiB: is it the right file?")
    try:
        loader = PlainLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            _check(node, {}, set())
            return _without_aliases(loader.construct_document(node)), _line_numbers(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UsageError(f"{origin} is not plain YAML: {_one_line(error)}") from None


def _check(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """How many values a node stands for. Each node is looked at once, however many aliases lead to it."""
    if id(node) in above:
        raise _error("an alias that contains itself", node.start_mark)
    if id(node) in sizes:
        return sizes[id(node)]
    above.add(id(node))
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        inner = [value for _, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    size = 1 + sum(_check(child, sizes, above) for child in inner)
    if size > MAX_VALUES:
        raise _error(f"more than {MAX_VALUES} values, with aliases expanded", node.start_mark)
    above.remove(id(node))
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error("a key must be a word", key.start_mark)
        if key.value in lines:
            again = f"the key {key.value[:MAX_DIGITS]!r} is already in line {lines[key.value]}: keep one of them"
            raise _error(again, key.start_mark)
        lines[key.value] = key.start_mark.line + 1


def _without_aliases(value: Any) -> Any:
    """Aliases as copies: an override of one place must not change another."""
    if isinstance(value, dict):
        return {key: _without_aliases(inner) for key, inner in value.items()}
    return [_without_aliases(inner) for inner in value] if isinstance(value, list) else value


def _line_numbers(node: yaml.Node, key_path: KeyPath = ()) -> Lines:
    found: Lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*key_path, key.value)
            found[inner] = key.start_mark.line + 1
            found |= _line_numbers(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*key_path, index)
            found[inner] = value.start_mark.line + 1
            found |= _line_numbers(value, inner)
    return found


def _error(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _one_line(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
