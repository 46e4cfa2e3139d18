"""Runs that nobody trained: their records, and the view that a page has of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from zero2all.track import RunRecord
from zero2all.track.run_locations import LocalRunLocation, SshRunLocation
from zero2all.track.run_view import RunView


def recording(directory: Path, **options: Any) -> RunRecord:
    """The record of a run in ``directory``, without metrics of the machine."""
    return RunRecord(directory / "record.jsonl", system_every=None, **options)


def record_steps(directory: Path, steps: Iterable[int] = (0,), **values: float) -> None:
    """Write steps, all with these values or with their number as the loss."""
    with recording(directory) as record:
        for step in steps:
            record.step(step, **(values or {"loss": float(step)}))


def opened(directory: Path) -> RunView:
    run = RunView(LocalRunLocation(directory))
    run.refresh()
    return run


def spy_reads(location: LocalRunLocation | SshRunLocation, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """File and length of everything that is read from a location from now on."""
    asked: list[tuple[str, int]] = []
    read = location.read
    monkeypatch.setattr(
        location, "read", lambda file, start, length: asked.append((file, length)) or read(file, start, length)
    )
    return asked
