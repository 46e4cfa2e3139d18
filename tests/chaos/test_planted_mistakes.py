"""The suite is worth something only if it notices: mistakes planted in the job turn its rows red."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero2all.chaos.simulated_nodes import simulation_unavailable_reason
from zero2all.chaos.suite import render_table, run_suite

PLANTED = Path(__file__).parent / "planted"


@pytest.mark.long
@pytest.mark.skipif(simulation_unavailable_reason() is not None, reason="nodes cannot be simulated here")
def test_a_job_that_does_not_check_histories_turns_a_row_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=os.pathsep)
    rows = run_suite(tmp_path, only=["nodes A and B, then A and C, then A and B"])
    problems = "; ".join(rows[0].problems)
    assert "from states of 2 different starts" in problems, render_table(rows)
    assert "the losses differ" in problems
