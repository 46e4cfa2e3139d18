"""The documents of a step for the live page, from a process that is ready before a reader clicks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zero2all.base.errors import Z2aError
from zero2all.cli.documents_process import DocumentsProcess
from zero2all.train import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_run: Run) -> Path:
    return tiny_run.directory


@pytest.fixture(scope="module")
def documents() -> Iterator[DocumentsProcess]:
    with DocumentsProcess() as process:
        yield process


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_names_or_first_words_sources_and_losses_within_a_second(documents: DocumentsProcess, run: Path) -> None:
    found: Any = documents(run, 8, losses=False)  # waits for the imports
    assert found["quick"], "a small model with a checkpoint: the page asks for losses by itself"
    assert all(one["source"] and (one["title"] or one["text"]) for one in found["documents"])
    assert not any("loss" in one for one in found["documents"])
    pid = documents.start().pid
    before = cpu_seconds(pid)
    with_losses: Any = documents(run, 8, losses=True)
    documents(run, 9, losses=False)
    assert cpu_seconds(pid) - before < 1.0
    assert all(one["loss"] > 0 for one in with_losses["documents"])
    text = {(one["sample"], one["document"]): one["text"] for one in found["documents"]}
    assert all(text[one["sample"], one["document"]] == one["text"] for one in with_losses["documents"])


def test_an_error_is_passed_on_and_a_process_that_dies_is_replaced(documents: DocumentsProcess, run: Path) -> None:
    with pytest.raises(Z2aError, match="the run has steps 0 to 11"):
        documents(run, 99, losses=False)
    os.kill(documents.start().pid, signal.SIGKILL)
    documents.start().wait()
    assert documents(run, 3, losses=False)
