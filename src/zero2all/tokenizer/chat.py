"""Render messages to text in which only the template's own markers can be special tokens.

The template of the directory is rendered as transformers would, but with the first and last character of every
special token replaced in the messages. So no message, and no two of them together, can spell a marker.

What the assistant writes is between ``{% generation %}`` and ``{% endgeneration %}``, as in transformers. In a template
without these tags it is found by rendering the conversation up to each answer.

A template of a model directory is a program of a stranger, so it runs in a child process. One child serves the whole
process, whatever the number of templates and threads. A template that exceeds its limits takes only the child with it,
and the next one gets a new child.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from zero2all.base.errors import Z2aError
from zero2all.base.limited_process import LimitedProcess
from zero2all.tokenizer import template_child
from zero2all.tokenizer.template_child import BEGIN_GENERATION, END_GENERATION
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
    """Variables of the template, such as ``eos_token``."""
    name: str = "the chat template"
    """The name in messages."""

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        *,
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
        chats: list[RenderedChat | ChatTemplateError] = []
        for found, one in zip(shared_process().render(self, [one.line for one in hidden]), hidden, strict=True):
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
        content = _to_json(chat.messages, chat.tools)
        revealed: dict[int, str] = {}
        if self._edge_pattern.search(content):
            disguise = self._disguise(content)
            content = _to_json(_translate(chat.messages, disguise), _translate(chat.tools, disguise))
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


def _to_json(messages: Any, tools: Any) -> str:
    """Messages and tools as one line."""
    try:
        return json.dumps([messages, tools], ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ChatTemplateError(f"the messages are not JSON: {error}") from error


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


PROGRAM = Path(template_child.__file__)
MAX_SECONDS = 10  # of CPU time, for one conversation
WALL_FACTOR = 6  # times the CPU time, for a child that neither computes nor answers; the CPU may be shared by many
MAX_MEMORY = 1 << 30
MAX_OUTPUT_BYTES = 16 << 20  # beside several times the size of the conversation
MAX_TEMPLATE_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 20  # of conversations sent at once


class ChatTemplateError(Z2aError):
    """The template does not take these messages."""


class TemplateLimitError(ChatTemplateError):
    """The template takes too long or needs too much memory."""


class RenderedText(NamedTuple):
    text: str
    generated: list[tuple[int, int]]
    """What the assistant writes: ranges of characters."""


class TemplateProcess:
    """Started with the first conversation, and again after one that exceeds the limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None

    def render(self, template: ChatTemplate, conversations: Sequence[bytes]) -> list[RenderedText | ChatTemplateError]:
        """The text of each conversation, or why the template does not take it."""
        if len(template.source) > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{template.name} has more than {MAX_TEMPLATE_BYTES:,} characters")
        header = {
            "source": template.source,
            "variables": dict(template.variables),
            "seconds": MAX_SECONDS,
            "output_bytes": MAX_OUTPUT_BYTES,
        }
        first = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
        answers: list[RenderedText | ChatTemplateError] = []
        with self._lock:
            while len(answers) < len(conversations):
                left, size = conversations[len(answers) :], 0
                count = next(
                    (n for n, line in enumerate(left) if (size := size + len(line)) > MESSAGE_BYTES), len(left)
                )
                answers += self._render_some(template, first, left[: max(1, count)])
        return answers

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def disown(self) -> None:
        """In a forked process: the child belongs to the parent, and must see the end of its connection."""
        if self._process is not None:
            self._process.disconnect()

    def _render_some(
        self, template: ChatTemplate, first: bytes, lines: Sequence[bytes]
    ) -> Iterator[RenderedText | ChatTemplateError]:
        """At least one answer; fewer than all after one that ended the child."""
        self._process = process = self._process or LimitedProcess(PROGRAM, (), 0, MAX_MEMORY)
        try:
            process.connection.send_bytes(b"\n".join([first, *lines]))
            for line in lines:
                most = MAX_OUTPUT_BYTES + 8 * len(line) + 1
                message = process.receive(time.monotonic() + WALL_FACTOR * MAX_SECONDS, most)
                code, body = message[:1], message[1:]
                if code == template_child.NO_MEMORY:
                    yield TemplateLimitError(f"{template.name} needs more than {MAX_MEMORY >> 20} MiB of memory")
                    self.close()  # its memory may be in pieces
                    return
                text = body.decode("utf-8", "surrogatepass")
                if code == template_child.FAILED:
                    yield ChatTemplateError(f"{template.name} does not take these messages: {text}")
                else:
                    rendered, generated = json.loads(text)
                    yield RenderedText(rendered, [(begin, end) for begin, end in generated])
        except (EOFError, OSError):
            reason = process.exit_reason()
            self._process = None
            limit = f"its process ended with {reason}" if reason else f"it takes more than {MAX_SECONDS} s"
            yield TemplateLimitError(f"{template.name} exceeds its limits: {limit}")
        except BaseException:  # such as Ctrl-C: answers of this message may still come
            self.close()
            raise


_shared = TemplateProcess()
atexit.register(lambda: _shared.close())


def shared_process() -> TemplateProcess:
    return _shared


def _start_anew() -> None:
    global _shared
    _shared.disown()
    _shared = TemplateProcess()


os.register_at_fork(after_in_child=_start_anew)
