"""Markdown of the reference pages."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

LINKS = "[Recipe](recipe.md) · [Command line](cli.md) · [Python API](python.md) · [Errors](errors.md)"
LINKS_CHINESE = (
    "[配方](recipe.zh-CN.md) · [命令行](cli.zh-CN.md) · [Python API](python.md) · [错误信息](errors.zh-CN.md)"
)
NOTE = "<!-- Generated: change the docstrings in src/zero2all and run `python docs/generate_reference.py`. -->"


def page(title: str, *parts: str, chinese: bool = False) -> str:
    """A page of its parts; empty ones are left out."""
    links = LINKS_CHINESE if chinese else LINKS
    return "\n\n".join([f"# {title}\n\n{links}", NOTE, *filter(None, parts)]) + "\n"


def table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table, or nothing if it has no rows."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *cells]) if cells else ""


def code(text: str, language: str = "sh") -> str:
    return f"```{language}\n{text}\n```"


def heading_link(heading: str, file: str = "") -> str:
    """A link to a heading in code font; GitHub makes its anchor of letters, digits, ``_`` and ``-``."""
    return f"[`{heading}`]({file}#{re.sub(r'[^a-z0-9_-]', '', heading.lower())})"


def prose(text: str) -> str:
    """A paragraph of a docstring in one line."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
    spans = text.split("`")  # every second one is code
    return "`".join(span if index % 2 else span.replace("<", "&lt;") for index, span in enumerate(spans))


def first_paragraph(docstring: str | None) -> str:
    return prose((docstring or "").strip().split("\n\n")[0])


def paragraphs(docstring: str) -> list[str]:
    """All paragraphs of a docstring; examples become code blocks."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\n(?!    )", inspect.cleandoc(docstring)):
        text, _, example = paragraph.partition("::\n\n")
        if text.startswith(">>>"):
            blocks.append(code(text, "python"))
        elif text.startswith("Example: "):
            blocks.append(code(text.removeprefix("Example: ")))
        else:
            blocks.append(prose(text + ":" if example else text))
        if example:
            blocks.append(code(textwrap.dedent(example), "python"))
    return blocks


def value_text(value: Any) -> str:
    """A value as it is written in a recipe."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    if value is None or isinstance(value, bool | list | tuple | dict):
        return yaml.safe_dump(json.loads(json.dumps(value)), default_flow_style=True).removesuffix("\n...\n").strip()
    return value.as_posix() if isinstance(value, Path) else str(value)
