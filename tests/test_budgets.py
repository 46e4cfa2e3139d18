"""Sizes of the project stay within ``budgets.toml``: a change that raises a budget says why in its commit.

``python -m tests.test_budgets`` prints the sizes now.
"""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.main import get_command

from zero2all.cli.main import app
from zero2all.recipe import Recipe

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "zero2all"
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """Lines without blank ones, comments, docstrings and imports.

    >>> code_lines('import os\\n\\n# why\\ndef one():\\n    "a number"\\n    return 1\\n')
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            assert isinstance(node, ast.stmt)
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@cache
def package_sizes() -> dict[str, int]:
    """Code lines of each package; modules beside the packages are together."""
    found: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        found[parts[0] if len(parts) > 1 else "modules"] += code_lines(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def options(command: Any) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            yield from options(below)
    else:
        yield from (parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--"))


def leaves(command: Any) -> int:
    return sum(map(leaves, command.commands.values())) if isinstance(command, TyperGroup) else 1


def recipe_keys(section: type[BaseModel]) -> int:
    """Keys that a user can set; a section in a list counts once."""
    count = 0
    for field in section.model_fields.values():
        inner = [
            kind for kind in nested_types(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        count += sum(map(recipe_keys, inner)) or 1
    return count


def nested_types(kind: Any) -> Iterator[Any]:
    yield kind
    for part in getattr(kind, "__args__", ()):
        yield from nested_types(part)


@cache
def surface() -> dict[str, int]:
    commands = get_command(app)
    assert isinstance(commands, TyperGroup)
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return {
        "code_lines": sum(package_sizes().values()),
        "files": len(list(SOURCE.rglob("*.py"))),
        "top_level_commands": len(commands.commands),
        "commands": leaves(commands),
        "options": sum(1 for name in options(commands) if name != "--json"),
        "recipe_keys": recipe_keys(Recipe),
        "test_lines": tests,
    }


BUDGETS = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", BUDGETS["surface"])
def test_the_surface_stays_within_its_budget(name: str) -> None:
    assert surface()[name] <= BUDGETS["surface"][name]


def test_every_package_stays_within_its_budget() -> None:
    sizes, budgets = package_sizes(), BUDGETS["code_lines"]
    assert {name: size for name, size in sizes.items() if size > budgets.get(name, 0)} == {}


if __name__ == "__main__":
    for table, numbers in (("surface", surface()), ("code_lines", package_sizes())):
        print(f"[{table}]", *(f"{name} = {number}" for name, number in numbers.items()), "", sep="\n")  # noqa: T201
