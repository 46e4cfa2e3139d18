"""One report of what several nodes saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_recipe
from tests.resilience.helpers import crashed
from zero2all.resilience.beat import AGENT_DIR, new_beat
from zero2all.resilience.exits import Kind
from zero2all.resilience.hang import Stuck, odd_ones
from zero2all.resilience.history import FRUITLESS, TRIES, History
from zero2all.resilience.report import Account, Cost, Death, add_cost, leave_account, make_report, summarize


def death(rank: int, kind: Kind, time: float, **more: Any) -> Death:
    return Death(rank, f"node{rank // 2}", 100 + rank, 1, kind, f"words of {rank}", time, 41, **more)


def account(node: str, *deaths: Death, **more: Any) -> Account:
    return Account(
        node=node, nodes=2, time=deaths[0].time if deaths else 9.0, kind=deaths[0].kind if deaths else "hang", step=41,
        since=0.1, decision="starting again", command=["train"], deaths=list(deaths), **more,
    )  # fmt: skip


def test_the_first_that_did_not_follow_another_is_named(tmp_path: Path) -> None:
    trace = "Traceback:\n  File x.py\nValueError: no"
    leave_account(tmp_path, account("node0", death(0, "cut off", 10.0), death(1, "ended by the agent", 10.5)))
    leave_account(tmp_path, account("node1", death(3, "crash", 10.1, traceback=trace, log=["its last line"])))
    path = make_report(tmp_path)
    assert path is not None
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
    assert make_report(tmp_path) is None, "the accounts are used up"
    restored = {"reason": "step 40 from memory", "rejected": ["checkpoint x is skipped: damaged"]}
    (tmp_path / "history.json").write_text(json.dumps({"lineage": [["a", 0]], "restored": restored}))
    add_cost(path, Cost(1, 2, 0, 1, 3, 1, 2, 1, steps_again=7))
    assert json.loads(path.read_text())["restored"] == restored
    assert "restored step 40 from memory\n    checkpoint x is skipped: damaged" in path.with_suffix(".txt").read_text()
    assert "it cost 11.0 s" in path.with_suffix(".txt").read_text()
    assert json.loads(path.read_text())["cost"]["steps_again"] == 7


def test_a_node_that_says_nothing_is_missed() -> None:
    assert summarize([account("node0", death(0, "cut off", 10.0))])["nodes_heard"] == ["node0"]


def stuck(rank: int, **more: Any) -> Stuck:
    usual: dict[str, Any] = {
        "step": 4, "state": "S", "line": "x.py:1 in f", "waits": True, "collective": "all_reduce number 7", "stack": "",
    }  # fmt: skip
    return Stuck(rank=rank, **{**usual, **more})


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    others = [stuck(0), stuck(1), stuck(3)]
    for odd in ({"state": "T"}, {"state": "D"}, {"waits": False}, {"collective": "all_reduce number 6"}, {"step": 3}):
        assert [one.rank for one, _ in odd_ones([*others, stuck(2, **odd)])] == [2], odd
    assert odd_ones(others) == []


def test_a_stopped_rank_counts_before_one_that_is_merely_elsewhere() -> None:
    assert [one.rank for one, _ in odd_ones([stuck(0, state="T"), stuck(1, waits=False)])] == [0]


def fail_at(history: History, step: int) -> str | None:
    history.reached(step)
    return history.give_up("crash", step, 1, 99)


def test_a_step_that_fails_right_after_a_resume_is_the_same_step(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [f"out={tmp_path}/out", f"checkpoint.flash_dir={tmp_path}/memory", "checkpoint.flash_every=3 steps"]
    recipe = tiny_recipe(world, *places, "train.steps=9")
    monkeypatch.setenv(AGENT_DIR, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    failed_after = []
    for _ in range(2):
        beat = new_beat(tmp_path, 0)
        crashed(recipe, 6)
        failed_after.append(beat.read().step)
    assert failed_after == [6, 6]


def test_the_same_step_is_tried_three_times() -> None:
    history = History()
    reasons = [fail_at(history, 12) for _ in range(TRIES)]
    assert reasons[:-1] == [None] * (TRIES - 1)
    assert reasons[-1] is not None
    assert "3 times after step 12" in reasons[-1]


def test_tries_that_get_nowhere_end() -> None:
    history = History()
    reasons = [fail_at(history, step) for step in (50, *range(FRUITLESS - 1))]
    assert reasons[:-1] == [None] * (FRUITLESS - 1)
    assert "without getting past step 50" in str(reasons[-1])


def test_failures_at_the_start_do_not_add_up_over_a_long_run() -> None:
    history = History()
    for reached in range(100, 1000, 100):
        assert fail_at(history, -1) is None
        history.reached(reached)


def test_progress_resets_the_pause() -> None:
    history = History()
    pauses = []
    for step in (5, 5, 4, 9):
        fail_at(history, step)
        pauses.append(history.pause())
    assert pauses == [0.0, 2.0, 4.0, 0.0]


def test_a_mistake_is_not_tried_again_and_a_stop_is_final_on_one_node() -> None:
    assert History().give_up("wrong usage", -1, 1, 99) is not None
    assert History().give_up("stopped", 5, 1, 99) is not None
    assert History().give_up("stopped", 5, 2, 99) is None
