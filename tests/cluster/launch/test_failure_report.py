"""Failure reports, hang culprits and the restart policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import crashed
from tests.conftest import tiny_recipe
from zero2all.base.environment import AGENT_DIR_VARIABLE
from zero2all.cluster.launch.exit_reason import FailureKind
from zero2all.cluster.launch.failure_report import (
    NodeReport,
    RankFailure,
    RecoveryCost,
    add_recovery_cost,
    combine_node_reports,
    render_text,
    write_failure_report,
    write_node_report,
)
from zero2all.cluster.launch.hang_detection import HungRank, find_hang_culprits
from zero2all.cluster.launch.heartbeat import StartupPhase, create_heartbeat
from zero2all.cluster.launch.node_failures import ObservedFailure, RecoveryTimer
from zero2all.cluster.launch.restart_policy import MAX_FAILURES_PER_STEP, MAX_FAILURES_WITHOUT_PROGRESS, RestartPolicy


def failure(rank: int, kind: FailureKind, time: float, **more: Any) -> RankFailure:
    return RankFailure(rank, f"node{rank // 2}", 100 + rank, 1, kind, f"words of {rank}", time, 41, **more)


def node_report(node: str, *deaths: RankFailure, **more: Any) -> NodeReport:
    return NodeReport(
        node=node, nodes=2, time=deaths[0].time if deaths else 9.0, kind=deaths[0].kind if deaths else "hang", step=41,
        since=0.1, decision="starting again", command=["train"], deaths=list(deaths), **more,
    )  # fmt: skip


def test_the_first_failure_that_is_no_consequence_is_named(tmp_path: Path) -> None:
    trace = "Traceback:\n  File x.py\nValueError: no"
    write_node_report(
        tmp_path, node_report("node0", failure(0, "cut off", 10.0), failure(1, "ended by the agent", 10.5))
    )
    write_node_report(tmp_path, node_report("node1", failure(3, "crash", 10.1, traceback=trace, log=["its last line"])))
    path = write_failure_report(tmp_path)
    report = json.loads(path.read_text())
    assert report["first"]["rank"] == 3
    assert report["kind"] == "crash"
    assert [entry["rank"] for entry in report["ranks"]] == [0, 3, 1]
    text = path.with_suffix(".txt").read_text()
    assert "first to fail: rank 3 on node1" in text
    assert "ValueError: no" in text
    assert "its last line" in text
    assert "starting again" in text
    assert len(text.splitlines()) < 40
    assert write_failure_report(tmp_path) is None, "the node reports are consumed"
    restored = {
        "step": 40,
        "history": "a",
        "where": "memory",
        "reason": "step 40 from memory",
        "rejected": ["checkpoint x is skipped: damaged"],
    }
    (tmp_path / "history.json").write_text(json.dumps({"lineage": [["a", 0]], "restored": restored}))
    add_recovery_cost(path, RecoveryCost(1, 2, 0, 1, 3, 1, 2, 1, steps_again=7))
    assert json.loads(path.read_text())["restored"] == restored
    assert "restored step 40 from memory\n    checkpoint x is skipped: damaged" in path.with_suffix(".txt").read_text()
    assert "recovery took 11.0 s" in path.with_suffix(".txt").read_text()
    assert json.loads(path.read_text())["cost"]["steps_again"] == 7


def test_steps_are_counted_from_the_first_one_however_late_the_agent_polls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = create_heartbeat(tmp_path, 0), create_heartbeat(tmp_path, 1)
    before(11)
    timer = RecoveryTimer(ObservedFailure("crash", 2.0, {0: before.read()}), torn_down=3.0, pause=0.0)
    after.record_phase(StartupPhase.LOADED, done=8)
    assert not timer.finish_if_stepped({0: after.read()})
    for step in range(9, 20):  # the agent was busy
        after(step)
    assert timer.finish_if_stepped({0: after.read()})
    assert "and 3 steps recomputed" in capsys.readouterr().err


def test_a_node_without_a_report_is_not_listed() -> None:
    assert combine_node_reports([node_report("node0", failure(0, "cut off", 10.0))]).nodes_heard == ["node0"]


def hung(rank: int, **more: Any) -> HungRank:
    usual: dict[str, Any] = {
        "step": 4, "state": "S", "line": "x.py:1 in f", "waits": True, "collective": "all_reduce number 7", "stack": "",
    }  # fmt: skip
    return HungRank(rank=rank, **{**usual, **more})


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    others = [hung(0), hung(1), hung(3)]
    for culprit in (
        {"state": "T"},
        {"state": "D"},
        {"waits": False},
        {"collective": "all_reduce number 6"},
        {"step": 3},
    ):
        assert [one.rank for one in find_hang_culprits([*others, hung(2, **culprit)])] == [2], culprit
    assert find_hang_culprits(others) == []


def test_a_stopped_rank_comes_before_one_outside_of_the_collective() -> None:
    assert [one.rank for one in find_hang_culprits([hung(0, state="T"), hung(1, waits=False)])] == [0]


def test_ranks_of_a_lost_node_that_wait_for_the_others_are_no_hang() -> None:
    lost = node_report("node0", failure(0, "cut off", 10.0))
    waiting = replace(node_report("node1", stuck=[hung(2), hung(3)]), time=12.0)
    report = combine_node_reports([lost, waiting])
    assert report.kind == "cut off"
    assert "no progress" not in render_text(report)
    looping = replace(waiting, stuck=[hung(2), hung(3, waits=False)])
    assert combine_node_reports([lost, looping]).kind == "hang"
    assert combine_node_reports([replace(waiting, time=8.0), lost]).kind == "hang"  # the ranks of node0 lost node1's


def fail_at(policy: RestartPolicy, step: int) -> str | None:
    policy.record_progress(step)
    return policy.reason_to_give_up("crash", step, 1, 99)


def test_a_step_that_fails_right_after_a_resume_is_the_same_step(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [f"out={tmp_path}/out", f"checkpoint.flash_dir={tmp_path}/memory", "checkpoint.flash_every=3 steps"]
    recipe = tiny_recipe(workspace, *directories, "train.steps=9")
    monkeypatch.setenv(AGENT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    failed_after = []
    for _ in range(2):
        heartbeat = create_heartbeat(tmp_path, 0)
        crashed(recipe, 6)
        failed_after.append(heartbeat.read().step)
    assert failed_after == [6, 6]


def test_the_same_step_may_fail_three_times() -> None:
    policy = RestartPolicy()
    reasons = [fail_at(policy, 12) for _ in range(MAX_FAILURES_PER_STEP)]
    assert reasons[:-1] == [None] * (MAX_FAILURES_PER_STEP - 1)
    assert "3 times after step 12" in reasons[-1]


def test_restarts_without_progress_end() -> None:
    policy = RestartPolicy()
    reasons = [fail_at(policy, step) for step in (50, *range(MAX_FAILURES_WITHOUT_PROGRESS - 1))]
    assert reasons[:-1] == [None] * (MAX_FAILURES_WITHOUT_PROGRESS - 1)
    assert "without getting past step 50" in str(reasons[-1])


def test_failures_at_the_start_do_not_add_up_over_a_long_run() -> None:
    policy = RestartPolicy()
    for reached in range(100, 1000, 100):
        assert fail_at(policy, -1) is None
        policy.record_progress(reached)


def test_progress_resets_the_backoff() -> None:
    policy = RestartPolicy()
    backoffs = []
    for step in (5, 5, 4, 9):
        fail_at(policy, step)
        backoffs.append(policy.backoff())
    assert backoffs == [0.0, 2.0, 4.0, 0.0]


def test_wrong_usage_is_not_retried_and_a_stop_is_final_on_one_node() -> None:
    assert RestartPolicy().reason_to_give_up("wrong usage", -1, 1, 99) is not None
    assert RestartPolicy().reason_to_give_up("stopped", 5, 1, 99) is not None
    assert RestartPolicy().reason_to_give_up("stopped", 5, 2, 99) is None
