"""The messages of errors that users can act on, from the source: templates with ``{name}`` for what is filled in."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import Counter
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
    assigned = [
        (target.id, node.value.value)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    times = Counter(name for name, _ in assigned)
    constants = {  # also of functions, if no other has the name
        name: str(value)
        for name, value in assigned
        if isinstance(value, str | int) and (name.isupper() or times[name] == 1)
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
        if re.search(r"[a-z]{2}", re.sub(r"\{[^}]*\}", "", template))
    }
    own = {Message("base/errors.py", text) for text in OWN_MESSAGES.values()}
    return sorted(found | own, key=lambda one: (one.package, one.template.lower()))


def templates(node: ast.AST, depth: int = 1) -> list[str]:
    """What an expression can be. Of a call of our own function, what it returns."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return _joined([_parts(one, depth) for one in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([templates(side, depth) or [UNKNOWN] for side in (node.left, node.right)])
    if isinstance(node, ast.IfExp):
        return templates(node.body, depth) + templates(node.orelse, depth)
    if isinstance(node, ast.Name) and node.id in source().constants:
        return [source().constants[node.id]]
    if isinstance(node, ast.Call):
        return _templates_of_call(node, depth)
    return []


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _parts(node: ast.expr, depth: int) -> list[str]:
    """A piece of an f-string: text, a message of our own function, or what is filled in."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    assert isinstance(node, ast.FormattedValue)
    is_message = isinstance(node.value, ast.Call) and _name(node.value.func).endswith("_message")
    return (templates(node.value, depth) if is_message else []) or [_filled(node.value)]


def _templates_of_call(node: ast.Call, depth: int) -> list[str]:
    name = _name(node.func)
    if name == "join" and node.args and isinstance(node.args[0], ast.List):
        lines = [part for part in node.args[0].elts if not isinstance(part, ast.Starred)]
        return ["\n".join((templates(line, depth) or [UNKNOWN])[0] for line in lines)]
    if (function := source().functions.get(name)) is None or not depth:
        return []
    lists = {
        target.id: one.value
        for one in ast.walk(function)
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and isinstance(one.value, ast.List)
    }
    found = []
    for part in ast.walk(function):
        if isinstance(part, ast.Return) and part.value is not None:
            value = part.value
            if isinstance(value, ast.Call) and _name(value.func) == "join" and isinstance(value.args[0], ast.Name):
                value = ast.Call(value.func, [lists.get(value.args[0].id, value.args[0])], [])  # the list it starts as
            found += templates(value, depth - 1)
    return found


def _filled(value: ast.expr) -> str:
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
