"""Docstrings and help texts are whole sentences or noun phrases, and no text leans on "that of" or "those of"."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import zero2all

SOURCE = Path(zero2all.__file__).parent
FRAGMENT = re.compile(r"\s*(Of|Those|That|By|As|Such)\b")
PRONOUN = re.compile(r"\b(that|those)\s+of\b", re.IGNORECASE)


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Each comment with the line below it, where the sentence may go on."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return ((line, f"{comment} {found.get(line + 1, '')}") for line, comment in found.items())


def test_no_docstring_starts_as_a_fragment() -> None:
    found = [
        f"{name}:{line}: {docstring}"
        for name, text in sources()
        for line, docstring in docstrings(ast.parse(text))
        if FRAGMENT.match(docstring)
    ]
    assert not found, "\n".join(found)


def help_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The value of each keyword ``help``: of commands, options and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield from ((one.lineno, one.value) for one in _texts(node.value))


def _texts(node: ast.expr) -> Iterator[ast.Constant]:
    """The first text of an expression: of a sum of texts, the rest does not start one."""
    if isinstance(node, ast.BinOp):
        yield from _texts(node.left)
    elif isinstance(node, ast.JoinedStr) and node.values:
        yield from _texts(node.values[0])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node


def test_no_help_text_starts_as_a_fragment() -> None:
    found = [
        f"{name}:{line}: {text}"
        for name, source in sources()
        if "help=" in source
        for line, text in help_texts(ast.parse(source))
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(found)


def test_a_fragment_in_a_help_text_is_found() -> None:
    tree = ast.parse('Option(help="Of a server."); Option(help="By " + name); Option(help="Print it."); f(x="Of it")')
    assert [bool(FRAGMENT.match(text)) for _, text in help_texts(tree)] == [True, True, False]


def test_no_text_says_that_of_or_those_of() -> None:
    found = [
        f"{name}:{line}: {said}"
        for name, text in sources()
        if re.search(r"\b(?i:that|those)\b\W+of\b", text)  # tokenizing every file takes seconds
        for line, said in (*strings(ast.parse(text)), *comments(text))
        if PRONOUN.search(said)
    ]
    assert not found, "\n".join(found)
