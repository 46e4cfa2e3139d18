"""Rules of style that no linter checks."""

from __future__ import annotations

import ast
from pathlib import Path

import zero2all

SOURCE = Path(zero2all.__file__).parent
MAX_FUNCTION_LINES = 70
LONG_FUNCTIONS = {"train/loop.py:_train"}


def test_no_function_is_longer_than_70_lines() -> None:
    lengths = {
        f"{path.relative_to(SOURCE)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS} == {}
