"""Nodes come and go with the states in their memory: a restart never combines two histories."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.helpers import TRAINING_STATE, resume, save, weight_of
from tests.checkpoint.threads import Start, ThreadCluster, run_threads
from zero2all.base.io import sha256_file
from zero2all.checkpoint import RankGroup


@pytest.fixture
def cluster(tmp_path: Path) -> ThreadCluster:
    return ThreadCluster(tmp_path)


def test_another_node_meanwhile_and_the_first_two_again(
    cluster: ThreadCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.start("AB", [990, 1000], durable=(900,), weight=1.0)
    assert cluster.start("AC", [980, 990], weight=2.0) == [Start(900, "on durable storage", 1.0)] * 2
    assert cluster.start("AB", [910]) == [Start(900, "on durable storage", 1.0)] * 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the state of step 990 in memory" in said
    assert "not held here (rank 1)" in said
    assert "of an abandoned history" in said


def test_two_nodes_then_one_then_two(cluster: ThreadCluster) -> None:
    cluster.start("AB", [990, 1000], durable=(900,), weight=1.0)
    assert cluster.start("A", [990, 1000], weight=2.0) == [Start(900, "on durable storage", 1.0)]
    assert cluster.start("AB", [910]) == [Start(900, "on durable storage", 1.0)] * 2


def test_one_node_reads_the_memory_of_its_own_history_with_another_world_size(cluster: ThreadCluster) -> None:
    """Two ranks that share a memory, then one: their slots are one state, and it is resharded."""
    cluster.start("AA", [990, 1000], durable=(900,), weight=1.0)
    assert cluster.start("A", [1010], weight=2.0) == [Start(1000, "in memory", 1.0)]


def test_all_nodes_of_an_abandoned_history_come_back(cluster: ThreadCluster) -> None:
    """Every rank holds the same state of the same history, and it is still not the run's."""
    cluster.start("AB", [990, 1000], durable=(900,), weight=1.0)
    assert cluster.start("CD", [910], durable=(950,), weight=2.0) == [Start(900, "on durable storage", 1.0)] * 2
    assert cluster.start("AB", [960]) == [Start(950, "on durable storage", 2.0)] * 2


def test_all_nodes_of_an_abandoned_history_come_back_before_the_new_one_is_durable(cluster: ThreadCluster) -> None:
    cluster.start("AB", [990, 1000], durable=(900,), weight=1.0)
    cluster.start("CD", [910, 920], weight=2.0)
    assert cluster.start("AB", []) == [Start(900, "on durable storage", 1.0)] * 2


def test_the_nodes_of_the_newest_history_restore_it_from_memory(cluster: ThreadCluster) -> None:
    cluster.start("AB", [990, 1000], durable=(900,), weight=1.0)
    cluster.start("AC", [980, 990], weight=2.0)
    assert cluster.start("AC", [], weight=3.0) == [Start(990, "in memory", 2.0)] * 2
    assert cluster.start("AC", [], weight=3.0) == [Start(990, "in memory", 2.0)] * 2


def test_a_node_is_drained_for_a_day(cluster: ThreadCluster) -> None:
    """Its states are older and newer than what the others have, of a history from before many others."""
    cluster.start("AB", [890, 1000], durable=(800,), weight=1.0)
    for number, step in enumerate((810, 830, 850, 900, 980)):
        cluster.start("AC", [step + 10, step + 20], durable=(step,), weight=2.0 + number)
    assert cluster.start("AB", [990]) == [Start(980, "on durable storage", 6.0)] * 2


def test_the_history_file_of_the_run_is_lost(cluster: ThreadCluster) -> None:
    """Then the newest durable checkpoint determines the current history."""
    cluster.start("AB", [990, 1000], durable=(900,), weight=1.0)
    cluster.start("CD", [910], durable=(950,), weight=2.0)
    (cluster.root / "run" / "history.json").write_text("{", encoding="utf-8")
    assert cluster.start("AB", []) == [Start(950, "on durable storage", 2.0)] * 2


def test_a_rollback_abandons_what_came_after_it(cluster: ThreadCluster) -> None:
    cluster.start("AB", [990], durable=(900,), weight=1.0)
    shutil.copytree(cluster.memory("B"), cluster.root / "B of before")

    def rank(rank_group: RankGroup) -> None:
        manager = cluster.manager(rank_group, "AB")
        resume(manager)
        before = manager.history.lineage
        save(manager, 1000)
        back = manager.roll_back(995)
        assert back.step == 990
        assert manager.history.lineage[:-1] == before[:-1]
        assert manager.history.lineage[-1] != before[-1]
        weight_of(manager).fill_(5.0)
        manager.save(1000, replace(TRAINING_STATE, skipped=[994]), durable=False)
        manager.wait_until_saved()

    run_threads(2, rank)
    assert cluster.start("AB", []) == [Start(1000, "in memory", 5.0)] * 2
    # One node has what it had before the rollback: step 990 is of both histories, 1000 only of the new one.
    shutil.rmtree(cluster.memory("B"))
    (cluster.root / "B of before").rename(cluster.memory("B"))
    assert cluster.start("AB", [])[0].step < 1000


def test_checkpoints_from_before_histories_are_restored(cluster: ThreadCluster) -> None:
    cluster.start("AB", [990], durable=(900,), weight=1.0)
    checkpoint = cluster.checkpoints.path(900)
    strip(checkpoint / "state.json")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = sha256_file(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (cluster.root / "run" / "history.json").unlink()
    for marker in cluster.root.glob("shm-*/*/*/slot-*.json"):
        strip(marker)
    assert cluster.start("AB", [910], weight=2.0) == [Start(900, "on durable storage", 1.0)] * 2
    assert cluster.start("AB", []) == [Start(910, "in memory", 2.0)] * 2


def strip(path: Path) -> None:
    values = json.loads(path.read_text())
    del values["lineage"]
    path.write_text(json.dumps(values))


def test_the_decision_is_kept_in_the_run_directory(cluster: ThreadCluster) -> None:
    cluster.start("AB", [990], durable=(900,), weight=1.0)
    cluster.start("AC", [])
    restored = json.loads((cluster.root / "run" / "history.json").read_text())["restored"]
    assert (restored["step"], restored["where"]) == (900, "durable")
    assert any("step 990 in memory" in why and "rank 1" in why for why in restored["rejected"])
