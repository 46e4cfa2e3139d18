"""Rules of style that no linter checks."""

from __future__ import annotations

import ast

from tests.test_structure import Function, modules, nodes

MAX_FUNCTION_LINES = 70


def lines_of(node: ast.AST) -> int:
    assert isinstance(node, Function)
    return (node.end_lineno or 0) - node.lineno + 1


def test_no_function_is_longer_than_70_lines() -> None:
    found = [(name, node) for name, node in nodes(Function) if lines_of(node) > MAX_FUNCTION_LINES]
    assert [f"{name}:{node.lineno}" for name, node in found if isinstance(node, Function)] == []


def test_a_training_step_is_at_most_40_lines() -> None:
    functions = [node for node in ast.walk(modules()["train/trainer.py"]) if isinstance(node, Function)]
    [step] = [node for node in functions if node.name == "train_step"]
    assert lines_of(step) <= 40
