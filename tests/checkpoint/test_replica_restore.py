"""A lost node is restored from the replicas that others hold."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.checkpoint.helpers import flip_a_bit
from tests.checkpoint.threads import ThreadCluster
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.checkpoint import ReplicaOptions, replicas
from zero2all.checkpoint.inspection import list_checkpoints
from zero2all.checkpoint.restore import RankReport, SlotReport, decide_restore
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.checkpoint.training_state import Branch, Lineage

STEPS = (10, 20)


@pytest.fixture(autouse=True)
def _separate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "memory_id", str)
    monkeypatch.setenv(JOB_SECRET_VARIABLE, "correct horse battery staple")


@pytest.fixture
def cluster(tmp_path: Path) -> ThreadCluster:
    return ThreadCluster(tmp_path, ReplicaOptions(1))


def lose(cluster: ThreadCluster, *nodes: str) -> None:
    for node in nodes:
        shutil.rmtree(cluster.memory(node).parent)


def restored(step: int, ranks: int) -> list[tuple[int, str, float]]:
    return [(step, "in memory", step + rank / 8) for rank in range(ranks)]


@pytest.mark.parametrize("lost", ["A", "B"])
def test_a_fresh_node_takes_the_states_of_the_lost_one_from_its_peer(cluster: ThreadCluster, lost: str) -> None:
    cluster.start("AABB", STEPS)
    lose(cluster, lost)
    assert cluster.start("AABB", (30,)) == restored(20, 4)
    assert "2 parts copied from other nodes" in cluster.reasons[-1]
    assert cluster.start("AABB", ()) == restored(30, 4), "and has replicas again"
    assert "copied" not in cluster.reasons[-1], "nothing is copied that is there"


def test_another_node_takes_its_place(cluster: ThreadCluster) -> None:
    cluster.start("ABC", STEPS)
    lose(cluster, "B")
    assert cluster.start("ADC", STEPS) == restored(20, 3)


@pytest.mark.parametrize("copies", [1, 2])
def test_two_nodes_are_lost_with_two_replicas_but_not_with_one(copies: int, tmp_path: Path) -> None:
    cluster = ThreadCluster(tmp_path, ReplicaOptions(copies))
    cluster.start("ABC", STEPS)
    lose(cluster, "A", "B")
    assert cluster.start("ABC", STEPS) == ([(0, "from scratch", 0.0)] * 3 if copies == 1 else restored(20, 3))


def test_fewer_and_more_nodes_reshard_from_memory(cluster: ThreadCluster) -> None:
    cluster.start("AABB", STEPS)
    lose(cluster, "B")
    assert {(step, where) for step, where, _ in cluster.start("AA", (30, 40))} == {(20, "in memory")}
    assert {(step, where) for step, where, _ in cluster.start("AABB", ())} == {(40, "in memory")}
    assert "2 parts copied" in cluster.reasons[-1], "once for the node, not for each of its ranks"
    assert "resharded from 2 ranks" in cluster.reasons[-1]


def test_uneven_nodes(cluster: ThreadCluster) -> None:
    cluster.start("AAAB", STEPS)
    lose(cluster, "A")
    assert cluster.start("AAAB", STEPS) == restored(20, 4)


@pytest.mark.parametrize("is_replica", [False, True])
def test_a_damaged_state_is_replaced_by_its_replica_and_a_damaged_replica_is_not_restored(
    is_replica: bool, cluster: ThreadCluster
) -> None:
    cluster.start("AB", STEPS)
    node = "B" if is_replica else "A"
    held = [slot for slot in find_staged_slots(cluster.memory(node)) if (slot.rank, slot.header.step) == (0, 20)]
    [damaged] = [slot for slot in held if slot.replica == is_replica]
    flip_a_bit(damaged.data)
    if is_replica:
        lose(cluster, "A")
        assert cluster.start("AB", STEPS) == restored(10, 2)
    else:
        assert cluster.start("AB", STEPS) == restored(20, 2)
        assert "1 parts copied" in cluster.reasons[-1]


@pytest.mark.parametrize(("nodes", "copies", "has_secret"), [("AA", 1, True), ("AB", 0, True), ("AB", 1, False)])
def test_replicas_are_off_on_one_node_if_turned_off_and_without_a_secret(
    nodes: str, copies: int, has_secret: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_secret:
        monkeypatch.delenv(JOB_SECRET_VARIABLE)
    cluster = ThreadCluster(tmp_path, ReplicaOptions(copies))
    cluster.start(nodes, STEPS)
    assert not any(slot.replica for node in nodes for slot in find_staged_slots(cluster.memory(node)))
    assert cluster.start(nodes, STEPS) == restored(20, 2)


def test_without_space_for_replicas_the_own_states_stay(
    cluster: ThreadCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replicas, "ReplicaSlots", full)
    cluster.start("AB", STEPS)
    assert "not enough space for replicas" in capsys.readouterr().err
    assert cluster.start("AB", STEPS) == restored(20, 2)


def test_the_listing_names_replicas_and_those_of_no_current_rank_are_removed(cluster: ThreadCluster) -> None:
    cluster.start("ABC", STEPS)
    rows = list_checkpoints(cluster.checkpoints, cluster.memory("B"))
    assert [row.notes for row in rows] == [["2 of 3 ranks", "replicas of ranks 0"]] * 2
    cluster.start("ABC", (30,))
    assert {path.name for path in cluster.memory("B").glob("r*-of-*")} == {"rank-1-of-3", "replica-0-of-3"}
    cluster.start("AB", (40,))
    assert {path.name for path in cluster.memory("B").glob("r*-of-*")} == {"rank-1-of-2", "replica-0-of-2"}


LINE: Lineage = (Branch("a", 0),)


def test_a_thousand_ranks_decide_fast_and_no_holder_sends_more_than_others() -> None:
    world, each = 1024, 8
    nodes = world // each
    reports = []
    for rank in range(world):
        node = rank // each
        held = [node, (node - 1) % nodes] if node != 5 else []
        slots = [
            SlotReport(part, world, step, LINE, "x", replica=of != node, bytes=1)
            for of in held
            for part in range(of * each, (of + 1) * each)
            for step in (980, 990)
        ]
        reports.append(RankReport(tuple(slots), "x", node))
    begin = time.process_time()
    decision = decide_restore(reports, [], LINE)
    assert time.process_time() - begin < 10
    assert decision.chosen.step == 990
    assert [(fetch.slot.rank, fetch.to) for fetch in decision.chosen.fetches] == [(r, r) for r in range(40, 48)]
    assert sorted(fetch.holder for fetch in decision.chosen.fetches) == list(range(48, 56))


def test_parts_that_do_not_fit_into_memory_are_not_copied() -> None:
    slots = tuple(SlotReport(part, 2, 990, LINE, "x", bytes=100) for part in range(2))
    reports = [RankReport(slots, "y", 0), RankReport((), "y", 1, free=199)]
    decision = decide_restore(reports, [], LINE)
    assert decision.chosen is None
    assert "no memory for 200B" in str(decision.rejected[0])
