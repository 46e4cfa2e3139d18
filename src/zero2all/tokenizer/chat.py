"""Render messages to text in which only the template's own markers can be special tokens.

The template of the directory is rendered as transformers would, but with the first and last character of every
special token replaced in the messages. So no message, and no two of them together, can spell a marker.

What the assistant writes is between ``{% generation %}`` and ``{% endgeneration %}``, as in transformers. In a template
without these tags it is found by rendering the conversation up to each answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from zero2all.tokenizer.template_child import BEGIN_GENERATION, END_GENERATION
from zero2all.tokenizer.template_process import (
    ChatTemplateError,
    TemplateSource,
    encode_conversation,
    shared_process,
)
from zero2all.tokenizer.vocabulary import split_special

PRIVATE_USE_CHARACTERS = range(0x10FFFB, 0x100000, -1)  # not used by ordinary text
JsonObject = Mapping[str, Any]
"""A message or a tool as the template takes it."""


class ChatInput(NamedTuple):
    """A conversation to render."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None = None
    add_generation_prompt: bool = False
    mark_generated: bool = True
    """Whether what the assistant writes is looked for, which takes long in a template without tags."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation by the chat template."""

    parts: list[str]
    """Text, marker, text, marker, ..., text, as ``split_special``; a marker is one that the template wrote."""
    generated: list[tuple[int, int]]
    """What the assistant writes, with the marker that ends its message: ranges of characters of all parts together."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it needs besides messages."""

    source: str
    markers: frozenset[str]
    """The special tokens of the vocabulary."""
    variables: Mapping[str, Any]
    """Such as ``eos_token``."""
    name: str = "the chat template"
    """As messages call it."""

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = False,
        mark_generated: bool = True,
    ) -> RenderedChat:
        [chat] = self.render_many([ChatInput(messages, tools, add_generation_prompt, mark_generated)])
        if isinstance(chat, ChatTemplateError):
            raise chat
        return chat

    def render_many(self, inputs: Sequence[ChatInput]) -> list[RenderedChat | ChatTemplateError]:
        """Each conversation, or why the template does not take it."""
        hidden = [self._hide(one) for one in inputs]
        source = TemplateSource(self.name, self.source, self.variables)
        chats: list[RenderedChat | ChatTemplateError] = []
        for found, one in zip(shared_process().render(source, [one.line for one in hidden]), hidden, strict=True):
            if isinstance(found, ChatTemplateError):
                chats.append(found)
                continue
            parts = split_special(found.text, self.markers)
            if one.revealed:
                parts = [part.translate(one.revealed) for part in parts]
            chats.append(RenderedChat(parts, found.generated))
        return chats

    def _hide(self, chat: ChatInput) -> _HiddenChat:
        """Most conversations have none of the characters that begin or end a marker, and nothing to hide."""
        content = encode_conversation(chat.messages, chat.tools)
        revealed: dict[int, str] = {}
        if self._edge_pattern.search(content):
            disguise = self._disguise(content)
            content = encode_conversation(_translate(chat.messages, disguise), _translate(chat.tools, disguise))
            revealed = {ord(hidden): chr(edge) for edge, hidden in disguise.items()}
        options = json.dumps([chat.add_generation_prompt, chat.mark_generated])
        return _HiddenChat(f"{content[:-1]}, {options[1:]}".encode("utf-8", "surrogatepass"), revealed)

    def _disguise(self, content: str) -> dict[int, str]:
        """For every character that begins or ends a marker, one that occurs nowhere."""
        used = frozenset(content + self.source)
        unused = (chr(code) for code in PRIVATE_USE_CHARACTERS if chr(code) not in used)
        try:
            return {ord(edge): next(unused) for edge in sorted(_edges(self.markers))}
        except StopIteration:
            raise ChatTemplateError("the messages use all private-use characters of Unicode") from None

    @property
    def _edge_pattern(self) -> re.Pattern[str]:
        return _any_of(_edges(self.markers))


class _HiddenChat(NamedTuple):
    line: bytes
    revealed: dict[int, str]
    """What the characters stand for that replace others."""


@lru_cache(maxsize=8)
def _edges(markers: frozenset[str]) -> frozenset[str]:
    return frozenset({edge for name in markers for edge in (name[0], name[-1])} | {BEGIN_GENERATION, END_GENERATION})


@lru_cache(maxsize=8)
def _any_of(characters: frozenset[str]) -> re.Pattern[str]:
    return re.compile("[" + re.escape("".join(sorted(characters))) + "]")


def _translate(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translate(name, table): _translate(inner, table) for name, inner in value.items()}
    return [_translate(inner, table) for inner in value] if isinstance(value, list | tuple) else value
