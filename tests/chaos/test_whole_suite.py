"""What ``z2a chaos`` does, all of it. A fault that cannot be caused here is skipped and says so in the table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero2all.chaos.faults import FAULTS
from zero2all.chaos.suite import run_suite, table


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="nodes and small disks need root")
def test_every_fault_is_survived(tmp_path: Path) -> None:
    rows = run_suite(tmp_path, seed=0)
    assert [row.fault for row in rows] == [fault.name for fault in FAULTS]
    assert not any(row.problems for row in rows), table(rows)
