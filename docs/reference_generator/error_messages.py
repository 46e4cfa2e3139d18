"""The messages of errors that users can act on, from the source: templates with ``{name}`` for what is filled in."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zero2all

SOURCE = Path(zero2all.__file__).parent
BASE = "Z2aError"
PRINTED_BY_CLI = "_exit_with_error"
UNKNOWN = "…"
# These write their message themselves: the class, and what it writes.
OWN_MESSAGES = {"RecipeError": "{file}: {number} mistakes\n  - {mistake}"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    file: str
    template: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")

    @property
    def example(self) -> str:
        """The message with a word for everything that is filled in."""
        return self.template.replace("{number}", "2").replace("{", "").replace("}", "")


class Source(NamedTuple):
    """What the messages of all files refer to."""

    trees: dict[str, ast.Module]
    errors: set[str]
    """Names of the error classes."""
    constants: dict[str, str]
    functions: dict[str, Function]


@functools.cache
def source() -> Source:
    trees = {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    constants = {
        target.id: str(node.value.value)
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str | int)
    }
    functions = {
        node.name: node
        for node in nodes
        if isinstance(node, Function) and node.returns is not None and ast.unparse(node.returns) == "str"
    }
    return Source(trees, _error_names(nodes), constants, functions)


def _error_names(nodes: list[ast.AST]) -> set[str]:
    bases = {node.name: {_name(base) for base in node.bases} for node in nodes if isinstance(node, ast.ClassDef)}
    found = {BASE}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


@functools.cache
def messages() -> list[Message]:
    """All messages, each once, in the order of files and lines."""
    found = {
        Message(file, template)
        for file, tree in source().trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and _name(node.func) in source().errors | {PRINTED_BY_CLI}
        for template in templates(node.args[0])
        if any(character.isalpha() for character in template.partition("{")[0] + template.rpartition("}")[2])
    }
    own = {Message("base/errors.py", text) for text in OWN_MESSAGES.values()}
    return sorted(found | own, key=lambda one: (one.package, one.template.lower()))


def templates(node: ast.AST, depth: int = 1) -> Iterator[str]:
    """What an expression can be. Of a call of our own function, what it returns."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(one.value if isinstance(one, ast.Constant) else _filled(one) for one in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in templates(node.left, depth) or [UNKNOWN]:
            for right in templates(node.right, depth) or [UNKNOWN]:
                yield left + right
    elif isinstance(node, ast.IfExp):
        yield from templates(node.body, depth)
        yield from templates(node.orelse, depth)
    elif isinstance(node, ast.Name) and node.id in source().constants:
        yield source().constants[node.id]
    elif isinstance(node, ast.Call):
        yield from _templates_of_call(node, depth)


def _templates_of_call(node: ast.Call, depth: int) -> Iterator[str]:
    name = _name(node.func)
    if name == "join" and node.args and isinstance(node.args[0], ast.List):
        parts = [part for part in node.args[0].elts if not isinstance(part, ast.Starred)]
        yield "\n".join(next(templates(part, depth), UNKNOWN) for part in parts)
    elif (function := source().functions.get(name)) is not None and depth:
        for part in ast.walk(function):
            if isinstance(part, ast.Return) and part.value is not None:
                yield from templates(part.value, depth - 1)


def _filled(node: ast.AST) -> str:
    assert isinstance(node, ast.FormattedValue)
    value = node.value
    if isinstance(value, ast.Name) and value.id in source().constants:
        return source().constants[value.id]
    if isinstance(value, ast.Call) and _name(value.func) in {"len", "sum", "max", "min", "count_text"}:
        return "{number}"
    return f"{{{_name(value).strip('_').lower() or UNKNOWN}}}"


def _name(node: ast.AST) -> str:
    """The word for what an expression is; of a call, its first argument's."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr in {"name", "__name__", "value"} else node.attr
    if isinstance(node, ast.Call):
        return _name(node.args[0]) if node.args else _name(node.func)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return ""
