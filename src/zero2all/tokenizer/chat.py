"""Render messages to text in which only the template's own markers can be special tokens.

The template of the directory is rendered as transformers would, but with the first and last character of every
special token replaced in the messages. So no message, and no two of them together, can spell a marker.

What the assistant writes is between ``{% generation %}`` and ``{% endgeneration %}``, as in transformers. In a template
without these tags it is found by rendering the conversation up to each answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zero2all.errors import Z2aError
from zero2all.tokenizer.special_tokens import split_special

BEGIN_GENERATION, END_GENERATION = "\U0010fffd", "\U0010fffc"
PRIVATE_USE_CHARACTERS = range(0x10FFFB, 0x100000, -1)  # not used by ordinary text
MAX_ITERATIONS = 1_000_000  # of all loops of a template together
MAX_SECONDS = 10.0  # of loops whose iterations take long
MAX_REPETITION = 1_000_000  # characters or elements that "text * number" may make
JsonObject = Mapping[str, Any]
"""A message or a tool as the template takes it."""


class ChatTemplateError(Z2aError):
    """The template does not take these messages."""


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

    @property
    def marks_generation(self) -> bool:
        return _compile_template(self.source).marks_generation

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = False,
        mark_generated: bool = True,
    ) -> RenderedChat:
        """Without ``mark_generated`` what the assistant writes is not looked for, which takes long in a template
        without tags."""
        disguise = self._disguise(messages, tools)
        hidden_messages, hidden_tools = _translate(messages, disguise), _translate(tools, disguise)
        text, generated = self._render(hidden_messages, hidden_tools, add_generation_prompt)
        if mark_generated and not self.marks_generation:
            generated = self._find_generated(text, hidden_messages, hidden_tools)
        revealed = {ord(hidden): chr(edge) for edge, hidden in disguise.items()}
        return RenderedChat([part.translate(revealed) for part in split_special(text, self.markers)], generated)

    def _render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None, add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges inside the tags for generation."""
        given = {"messages": messages, "tools": tools}
        try:
            text = _compile_template(self.source).render(
                {**self.variables, **given, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ChatTemplateError(f"the chat template does not take these messages: {error}") from error
        return _take_out_marks(text)

    def _disguise(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None) -> dict[int, str]:
        """For every character that begins or ends a marker, one that occurs nowhere."""
        content = json.dumps([messages, tools], ensure_ascii=False, default=str) + self.source
        unused = (chr(code) for code in PRIVATE_USE_CHARACTERS if chr(code) not in content)
        edges = {edge for name in self.markers for edge in (name[0], name[-1])} | {BEGIN_GENERATION, END_GENERATION}
        return {ord(edge): next(unused) for edge in sorted(edges)}

    def _find_generated(
        self, text: str, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None
    ) -> list[tuple[int, int]]:
        """Empty if the text up to an answer is not the beginning of the whole: then nothing can be told."""
        found = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            try:
                before, _ = self._render(messages[:number], tools, add_generation_prompt=True)
                after, _ = self._render(messages[: number + 1], tools, add_generation_prompt=False)
            except ChatTemplateError:
                return []
            if not after.startswith(before) or not text.startswith(after):
                return []
            found.append((len(before), max(len(before), len(after.rstrip("\n")))))
        return found


def _take_out_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of generation, and what was between them."""
    kept: list[str] = []
    ranges, begin, length = [], 0, 0
    for number, piece in enumerate(split_special(text, frozenset({BEGIN_GENERATION, END_GENERATION}))):
        if number % 2 == 0:
            kept.append(piece)
            length += len(piece)
        elif piece == BEGIN_GENERATION:
            begin = length
        elif length > begin:
            ranges.append((begin, length))
    return "".join(kept), ranges


def _translate(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translate(name, table): _translate(inner, table) for name, inner in value.items()}
    return [_translate(inner, table) for inner in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class _CompiledTemplate:
    template: Any
    marks_generation: bool
    limits: _LoopLimits

    def render(self, variables: dict[str, Any]) -> str:
        self.limits.restart()
        text: str = self.template.render(variables)
        return text


class _LoopLimits(threading.local):
    """Iterations that a rendering has left, and until when: a template of somebody else may loop for ever."""

    iterations, deadline = 0, 0.0

    def restart(self) -> None:
        self.iterations, self.deadline = MAX_ITERATIONS, time.monotonic() + MAX_SECONDS

    def count(self) -> None:
        self.iterations -= 1
        if self.iterations < 0 or time.monotonic() > self.deadline:
            raise ValueError(f"its loops take more than {MAX_ITERATIONS:,} iterations or {MAX_SECONDS:g} seconds")


@lru_cache(maxsize=8)
def _compile_template(source: str) -> _CompiledTemplate:
    """Compiled with the settings and helpers that Hugging Face templates expect."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    limits = _LoopLimits()

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
            if operator == "**" or sizes != [left, right]:
                result = sizes[0] * sizes[1] if operator == "*" else abs(sizes[0]) ** min(abs(sizes[1]), 64)
                if result > MAX_REPETITION:
                    raise ValueError(f"it computes {operator} of too large values")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{BEGIN_GENERATION}{caller()}{END_GENERATION}"

        def count(self) -> None:
            limits.count()

    def refuse(message: str) -> None:
        raise ValueError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    extension = next(one for one in environment.extensions.values() if isinstance(one, Generation))
    tree = environment.parse(source)
    marks = any(
        isinstance(call := block.call, nodes.Call)
        and isinstance(call.node, nodes.ExtensionAttribute)
        and call.node.name == "mark"
        for block in tree.find_all(nodes.CallBlock)
    )
    bodies = [*(loop.body for loop in tree.find_all(nodes.For)), *(macro.body for macro in tree.find_all(nodes.Macro))]
    for body in bodies:
        body.insert(0, nodes.ExprStmt(extension.call_method("count"), lineno=1))
    template = environment.template_class.from_code(environment, environment.compile(tree), environment.globals)
    return _CompiledTemplate(template, marks, limits)
