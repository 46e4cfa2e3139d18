"""A program of its own that renders chat templates, which are programs of strangers, for ``chat``.

It imports nothing of zero2all (``limited_process`` says why). A message is lines of JSON: the template, then one
conversation per line. The answers are one message for each conversation, which begins with one of the codes below.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

RENDERED, FAILED, NO_MEMORY = b"R", b"F", b"M"
BEGIN_GENERATION, END_GENERATION = "\U0010fffd", "\U0010fffc"
_MARKS = re.compile(f"([{BEGIN_GENERATION}{END_GENERATION}])")

Json = dict[str, Any]
Ranges = list[tuple[int, int]]


class Template(NamedTuple):
    render: Callable[[Json], str]
    marks_generation: bool


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Compiled with the settings and helpers that Hugging Face templates expect."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{BEGIN_GENERATION}{caller()}{END_GENERATION}"

    def refuse(message: str) -> None:
        raise ValueError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    tree = environment.parse(source)
    marks = any(
        isinstance(call := block.call, nodes.Call)
        and isinstance(call.node, nodes.ExtensionAttribute)
        and call.node.name == "mark"
        for block in tree.find_all(nodes.CallBlock)
    )
    template = environment.template_class.from_code(environment, environment.compile(tree), environment.globals)
    return Template(template.render, marks)


class Rendering:
    """One conversation by one template."""

    def __init__(self, header: Json, messages: list[Json], tools: list[Json] | None) -> None:
        self._template = compile_template(header["source"])
        self._variables = {**header["variables"], "tools": tools}
        self._messages = messages

    def whole(self, add_generation_prompt: bool, mark_generated: bool) -> tuple[str, Ranges]:
        text, generated = self._render(len(self._messages), add_generation_prompt=add_generation_prompt)
        if mark_generated and not self._template.marks_generation:
            generated = self._find_generated(text)
        return text, generated

    def _render(self, count: int, *, add_generation_prompt: bool) -> tuple[str, Ranges]:
        """The text of the first messages, and the ranges inside the tags for generation."""
        given = {"messages": self._messages[:count], "add_generation_prompt": add_generation_prompt}
        return _take_out_marks(self._template.render({**self._variables, **given}))

    def _find_generated(self, text: str) -> Ranges:
        """Empty if the text up to an answer is not the beginning of the whole: then nothing can be told."""
        found = []
        for number, message in enumerate(self._messages):
            if message.get("role") != "assistant":
                continue
            try:
                before, _ = self._render(number, add_generation_prompt=True)
                after, _ = self._render(number + 1, add_generation_prompt=False)
            except MemoryError:
                raise
            except Exception:  # a template may take whole conversations only
                return []
            if not after.startswith(before) or not text.startswith(after):
                return []
            found.append((len(before), max(len(before), len(after.rstrip("\n")))))
        return found


def _take_out_marks(text: str) -> tuple[str, Ranges]:
    """The text without the marks of generation, and what was between them."""
    kept: list[str] = []
    ranges, begin, length = [], 0, 0
    for number, piece in enumerate(_MARKS.split(text)):
        if number % 2 == 0:
            kept.append(piece)
            length += len(piece)
        elif piece == BEGIN_GENERATION:
            begin = length
        elif length > begin:
            ranges.append((begin, length))
    return "".join(kept), ranges


def _limit_time(seconds: int) -> None:
    """The kernel ends this process if it computes for longer from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + seconds + 1, hard))


def answer(header: Json, line: bytes) -> bytes:
    most = header["output_bytes"] + 8 * len(line)  # a template may write what it is given several times
    try:
        messages, tools, *options = json.loads(line.decode("utf-8", "surrogatepass"))
        rendered = Rendering(header, messages, tools).whole(*options)
        body = json.dumps(rendered, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        return NO_MEMORY
    except Exception as error:  # a template is a program: it can fail in any way
        return FAILED + f"{error}"[:1000].encode("utf-8", "replace")
    return RENDERED + body if len(body) <= most else FAILED + f"it writes more than {most >> 20} MiB".encode()


def main(connection: Connection) -> None:
    while True:
        first, *lines = connection.recv_bytes().split(b"\n")
        header = json.loads(first.decode("utf-8", "surrogatepass"))
        for line in lines:
            _limit_time(header["seconds"])
            connection.send_bytes(answer(header, line))
