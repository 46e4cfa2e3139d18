"""The CPU use of other programs, from the counters of the kernel."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zero2all.base.machine import cpus
from zero2all.base.machine.cpus import OtherCpuUse, busy_note


def stat(path: Path, *cores: tuple[int, int]) -> None:
    """/proc/stat of cores, each with seconds of user and idle time; other counters are zero."""
    ticks = os.sysconf("SC_CLK_TCK")
    rows = [f"cpu{number} {user * ticks} 0 0 {idle * ticks} 0 0 0 0 0 0" for number, (user, idle) in enumerate(cores)]
    path.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *rows, "intr 5 6"]))


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stat"
    read = cpus._read_cpu_times
    monkeypatch.setattr(cpus, "_read_cpu_times", lambda: read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return path


@pytest.mark.parametrize(
    ("own", "ranks", "share"),
    [(0, "1", 0.75), (10, "1", 0.25), (5, "2", 0.25), (15, "1", 0.0), (99, "1", 0.0)],
)
def test_the_share_of_others_is_what_is_busy_without_this_program(
    counters: Path, monkeypatch: pytest.MonkeyPatch, own: int, ranks: str, share: float
) -> None:
    """15 of 20 seconds are busy on the two cores that this process may use; the third core does not count."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(time, "process_time", lambda: 100.0)
    stat(counters, (100, 50), (200, 50), (7, 7))
    others = OtherCpuUse()
    monkeypatch.setattr(time, "process_time", lambda: 100.0 + own)
    stat(counters, (110, 50), (205, 55), (507, 7))
    assert others.share() == pytest.approx(share)
    assert others.share() is None, "no time has passed since"


def test_a_system_without_counters_reports_nothing(counters: Path) -> None:
    others = OtherCpuUse()
    assert others.share() is None
    counters.write_text("nonsense")
    assert others.share() is None
    assert busy_note(None) == ""


def test_a_note_is_made_of_a_noticeable_share_only() -> None:
    assert busy_note(0.19) == ""
    assert busy_note(0.456) == "other programs used 46% of the CPU"
