"""The suite is worth something only if it notices: mistakes planted in the job turn its rows red."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.simulated_nodes import simulation_unavailable_reason
from tests.chaos.suite import run_suite, select_faults

PLANTED = Path(__file__).parent / "planted"
needs_nodes = pytest.mark.skipif(simulation_unavailable_reason() is not None, reason="nodes cannot be simulated here")


def plant(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every process that is started from now on."""
    monkeypatch.setenv("Z2A_TEST_MISTAKE", mistake)
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=os.pathsep)


def problems_of(fault: str, out: Path) -> str:
    [row] = run_suite(out, select_faults([fault]))
    return "; ".join(row.problems)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (
            "ignore_histories",
            "from zero2all.checkpoint import restore; assert restore._why_abandoned(None, None) is None; "
            "assert restore.SlotReport.history.fget(None) == 'the only one'",
        ),
        (
            "keep_replicas_at_home",
            "from zero2all.checkpoint.replicas import plan_replicas; "
            "assert plan_replicas('AABB', 1) == [(1,), (0,), (3,), (2,)]",
        ),
    ],
)
def test_a_mistake_is_planted_in_new_processes(mistake: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(mistake, monkeypatch)
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


@pytest.mark.long
@needs_nodes
def test_a_job_that_does_not_check_histories_turns_a_row_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("ignore_histories", monkeypatch)
    problems = problems_of("nodes A and B, then A and C, then A and B", tmp_path)
    assert "from states of 2 different starts" in problems
    assert "the losses differ" in problems


@pytest.mark.long
@needs_nodes
def test_replicas_on_the_node_of_the_original_turn_a_row_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("keep_replicas_at_home", monkeypatch)
    problems = problems_of("a node is replaced", tmp_path)
    assert "steps were repeated" in problems
    assert "the log lacks '2 parts copied from other nodes'" in problems
