"""Rules of style that no linter checks."""

from __future__ import annotations

import ast
from pathlib import Path

import zero2all

SOURCE = Path(zero2all.__file__).parent
MAX_FUNCTION_LINES = 70


def test_no_function_is_longer_than_70_lines() -> None:
    lengths = {
        f"{path.relative_to(SOURCE)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_a_training_step_is_at_most_40_lines() -> None:
    [step] = [
        node
        for node in ast.walk(ast.parse((SOURCE / "train" / "trainer.py").read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "train_step"
    ]
    assert (step.end_lineno or 0) - step.lineno + 1 <= 40
