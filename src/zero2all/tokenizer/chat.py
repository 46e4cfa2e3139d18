"""Render messages to text in which only the template's own markers can be special tokens.

The template of the directory is rendered as transformers would, but with the first and last character of every
special token replaced in the messages. So no message, and no two of them together, can spell a marker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from zero2all.errors import Z2aError
from zero2all.tokenizer.special_tokens import split_special

PRIVATE_USE_CHARACTERS = range(0x10FFFD, 0x100000, -1)  # not used by ordinary text
JsonObject = Mapping[str, Any]
"""A message or a tool as the template takes it."""


class ChatTemplateError(Z2aError):
    """The template does not take these messages."""


def split_rendered_chat(
    template: str,
    names: Iterable[str],
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject] | None,
    variables: dict[str, Any],
) -> list[str]:
    """Text, marker, text, marker, ..., text, as ``split_special``; a marker is one that the template wrote."""
    content = json.dumps([messages, tools], ensure_ascii=False, default=str) + template
    unused = (chr(code) for code in PRIVATE_USE_CHARACTERS if chr(code) not in content)
    edges = {edge for name in names for edge in (name[0], name[-1])}
    disguise = {ord(edge): next(unused) for edge in sorted(edges)}
    try:
        rendered = _compile_template(template).render(
            messages=_translate(messages, disguise), tools=_translate(tools, disguise), **variables
        )
    except Exception as error:  # a template is a program: it can fail in any way
        raise ChatTemplateError(f"the chat template does not take these messages: {error}") from error
    revealed = {ord(hidden): chr(edge) for edge, hidden in disguise.items()}
    return [part.translate(revealed) for part in split_special(rendered, frozenset(names))]


def _translate(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translate(name, table): _translate(inner, table) for name, inner in value.items()}
    return [_translate(inner, table) for inner in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=8)
def _compile_template(template: str) -> Any:
    """Compiled with the settings and helpers that Hugging Face templates expect."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template)
