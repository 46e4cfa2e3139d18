"""An agent reads the heartbeat of a rank at any moment, also while it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero2all.cluster.launch.heartbeat import Heartbeat, StartupPhase, create_heartbeat


class Page(bytearray):
    """Counts assignments. ``struct.pack_into`` makes none: it fills the buffer with zeros, then with values."""

    assigned = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.assigned += 1
        super().__setitem__(key, value)


def test_a_heartbeat_is_written_at_once_and_never_reads_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(None)
    page = Page(heartbeat._page[:])
    monkeypatch.setattr(heartbeat, "_page", page)
    heartbeat.record_phase(StartupPhase.STEPPED)
    heartbeat(12)
    heartbeat.ping()
    assert page.assigned == 3
    assert heartbeat.read().step == 12


def test_a_rank_of_a_previous_round_keeps_its_own_page(tmp_path: Path) -> None:
    first = create_heartbeat(tmp_path, 0)
    old_rank = Heartbeat(first.path)
    second = create_heartbeat(tmp_path, 0)
    old_rank(12)
    assert first.read().step == 12
    assert second.read().step == -1
