"""What is typed during an answer is not part of it on the terminal, and not lost."""

from __future__ import annotations

import os
import pty
import select
import sys
import termios
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from zero2all.cli import chat
from zero2all.generation.serve.chat import AnswerStats


class Terminal:
    def __init__(self) -> None:
        self.keyboard, self.follower = pty.openpty()
        self.stdin = open(self.follower, closefd=False)  # noqa: SIM115 - as long as the terminal

    def type(self, text: str) -> str:
        """What the terminal shows of it."""
        os.write(self.keyboard, text.encode())
        shown = b""
        while select.select([self.keyboard], [], [], 0.2)[0]:
            shown += os.read(self.keyboard, 1000)
        return shown.decode()

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.follower)[3] & termios.ECHO)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    opened = Terminal()
    monkeypatch.setattr(sys, "stdin", opened.stdin)
    yield opened
    os.close(opened.keyboard)
    os.close(opened.follower)


class Session:
    """Types while it answers."""

    stats = AnswerStats(1, 1, 1.0, "stop", 0)

    def __init__(self, terminal: Terminal, error: BaseException | None) -> None:
        self._terminal, self._error, self.shown = terminal, error, ""

    def answer(self, text: str) -> Generator[str]:
        yield "one "
        self.shown += self._terminal.type("typed early\n")
        if self._error is not None:
            raise self._error
        yield "two"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), RuntimeError("crash")])
def test_what_is_typed_during_an_answer_is_not_shown_in_it(terminal: Terminal, error: BaseException | None) -> None:
    assert "before" in terminal.type("before\n")
    assert terminal.stdin.readline() == "before\n"
    session: Any = Session(terminal, error)
    with suppress(RuntimeError):
        chat._answer(session, "question", lambda text: None)
    assert session.shown == ""
    assert terminal.echoes
    assert terminal.stdin.readline() == "typed early\n"
