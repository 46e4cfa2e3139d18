"""Progress and findings on a terminal and in a log file."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from zero2all.base import console
from zero2all.base.console import _ProgressLog, progress
from zero2all.base.findings import Finding, finding_if, page_finding


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(console, "console", Console(file=io.StringIO()))
    found: list[str] = []
    monkeypatch.setattr(console, "say", found.append)
    return found


def test_a_log_file_gets_lines_also_while_nothing_advances(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LOG_INTERVAL", 0.001)
    printed = threading.Event()
    monkeypatch.setattr(console, "say", lambda line: (lines.append(line), printed.set()))
    with progress("reading 5MB", 10) as advance:
        assert printed.wait(60)
        assert lines[0] == "reading 5MB: 0s so far"
        advance(4)
        for _ in range(2):  # the first may have been on its way
            printed.clear()
            assert printed.wait(60)
        assert lines[-1].startswith("reading 5MB: 40%, ")
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_a_short_task_prints_nothing(lines: list[str]) -> None:
    with progress("reading", 10) as advance:
        advance(10)
    assert lines == []


def test_a_failure_ends_the_lines(lines: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), progress("reading"):
        raise ZeroDivisionError
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_what_a_line_says() -> None:
    log = _ProgressLog("reading", 200)
    assert log.line(65) == "reading: 1m05s so far"
    log(50)
    assert log.line(60) == "reading: 25%, 3m00s left"
    log(500)
    assert log.line(60) == "reading: 100%, 0s left"
    log.describe("writing")
    assert log.line(60) == "writing: 100%, 0s left"
    unknown = _ProgressLog("counting", None)
    unknown(5)
    assert unknown.line(7) == "counting: 7s so far"
    transfer = _ProgressLog("downloading", 800e6, is_transfer=True)
    transfer(200e6)
    assert transfer.line(20) == "downloading: 25%, 200MB, 10.00MB/s, 1m00s left"


def test_a_terminal_gets_a_bar_and_no_lines(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(console, "console", terminal)
    monkeypatch.setattr(console, "LOG_INTERVAL", 0.0)
    with progress("reading", 4) as advance:
        advance(2)
    assert lines == []
    assert "reading" in terminal.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_with_a_delay_appears_after_it(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    shown = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    monkeypatch.setattr(console, "console", shown)
    printed = threading.Event()
    monkeypatch.setattr(console, "LOG_INTERVAL", 3600.0)
    monkeypatch.setattr(console, "say", lambda line: (lines.append(line), printed.set()))
    monkeypatch.setattr(console.Progress, "start", lambda bar: printed.set())
    with progress("planning", delay=60.0):
        pass
    assert not printed.is_set()
    with progress("planning", delay=0.001) as task:
        assert printed.wait(60)
        task.describe("searching", 10)
        task(1)
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_a_finding_in_a_terminal_has_its_remedy_on_a_line_of_its_own() -> None:
    assert str(Finding("bad", "disk", "full", "remove old runs")) == "BAD  disk: full\n     remove old runs"
    assert str(Finding("good", "disk", "90GB free")) == "ok   disk: 90GB free"


def test_the_page_gets_reason_and_remedy_in_both_languages() -> None:
    shown = page_finding(Finding("note", "spike", "2 steps", "see step 7", 7, "两步"))
    assert vars(shown) == {
        "rule": "spike", "level": "note", "text": "2 steps; see step 7", "text_zh": "两步", "step": 7,
    }  # fmt: skip
    assert page_finding(Finding("bad", "check failed", "no file")).text_zh == "no file"


def test_only_what_is_wrong_has_a_remedy() -> None:
    said = {"what": "files", "why": "10 open", "remedy": "raise it"}
    assert finding_if(wrong=True, level="bad", **said) == Finding("bad", "files", "10 open", "raise it")
    assert finding_if(wrong=False, level="bad", **said) == Finding("good", "files", "10 open")
