"""Renders chat templates in a child process: a template of a model directory is a program of a stranger.

One child serves the whole process, whatever the number of templates and threads. A template that exceeds its limits
takes only the child with it, and the next one gets a new child.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zero2all.errors import Z2aError
from zero2all.limited_process import LimitedProcess
from zero2all.tokenizer import template_child

PROGRAM = Path(template_child.__file__)
MAX_SECONDS = 10  # of CPU time, for one conversation
WALL_FACTOR = 6  # times the CPU time, for a child that neither computes nor answers; the CPU may be shared by many
MAX_MEMORY = 1 << 30
MAX_ITERATIONS = 1_000_000  # of all loops of a template together
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


@dataclass(frozen=True)
class TemplateSource:
    name: str
    """As messages call it."""
    source: str
    variables: Mapping[str, Any]


def encode_conversation(messages: Any, tools: Any) -> str:
    """As one line."""
    try:
        return json.dumps([messages, tools], ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ChatTemplateError(f"the messages are not JSON: {error}") from error


class TemplateProcess:
    """Started with the first conversation, and again after one that exceeds the limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None

    def render(
        self, template: TemplateSource, conversations: Sequence[bytes]
    ) -> list[RenderedText | ChatTemplateError]:
        """The text of each conversation, or why the template does not take it."""
        if len(template.source) > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{template.name} has more than {MAX_TEMPLATE_BYTES:,} characters")
        header = {
            "source": template.source,
            "variables": dict(template.variables),
            "iterations": MAX_ITERATIONS,
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
        self, template: TemplateSource, first: bytes, lines: Sequence[bytes]
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
