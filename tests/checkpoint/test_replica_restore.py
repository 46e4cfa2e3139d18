"""A lost node is restored from the replicas that others hold."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.checkpoint.helpers import TRAINING_STATE, tiny_manager, weight_of
from tests.checkpoint.test_histories import KEY
from tests.checkpoint.threads import Rank0Store, run_threads
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.checkpoint import RankGroup, ReplicaOptions, replicas
from zero2all.checkpoint.inspection import list_checkpoints
from zero2all.checkpoint.restore import RankReport, SlotReport, decide_restore
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.checkpoint.training_state import Branch, Lineage

STEPS = (10, 20)


class Cluster:
    """Ranks as threads on nodes with their own memory; each rank has its own weights, so that parts are told apart."""

    def __init__(self, root: Path, copies: int = 1) -> None:
        self.root, self.copies = root, copies
        self.checkpoints = Rank0Store(root / "run" / "checkpoints", keep=2)
        self.reasons: list[str] = []
        (root / "run").mkdir()

    def memory(self, node: str) -> Path:
        return self.root / f"shm-{node}" / KEY

    def lose(self, node: str) -> None:
        shutil.rmtree(self.memory(node).parent)

    def start(self, nodes: str, steps: tuple[int, ...] = STEPS) -> list[tuple[int, str, float]]:
        """A rank for each letter: restore, save these steps, be killed. Returns what each rank restored."""

        def rank(rank_group: RankGroup) -> tuple[int, str, float]:
            directory = self.memory(nodes[rank_group.rank])
            options = ReplicaOptions(self.copies)
            manager = tiny_manager(self.root / "run", directory, rank_group, self.checkpoints, options)
            try:
                found = manager.find_restore_point()
                at = (0, "from scratch", 0.0)
                if found is None:
                    manager.begin_history(None)
                else:
                    manager.load(found)
                    at = (found.step, found.location, weight_of(manager)[0, 0].item())
                self.reasons.append(manager.decision.reason)
                for step in steps:
                    weight_of(manager).fill_(step + rank_group.rank / 8)
                    manager.save(step, TRAINING_STATE, durable=False)
                    manager.wait_until_saved()
                    assert manager.memory.replicas is None or manager.memory.replicas.wait(30)
                rank_group.on_all_ranks(lambda: None)
                return at
            finally:
                if manager.memory.replicas is not None:
                    manager.memory.replicas.close()

        return run_threads(len(nodes), rank)


@pytest.fixture(autouse=True)
def _separate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "memory_id", str)
    monkeypatch.setenv(JOB_SECRET_VARIABLE, "correct horse battery staple")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def restored(step: int, ranks: int) -> list[tuple[int, str, float]]:
    return [(step, "in memory", step + rank / 8) for rank in range(ranks)]


@pytest.mark.parametrize("lost", ["A", "B"])
def test_a_fresh_node_takes_the_states_of_the_lost_one_from_its_peer(cluster: Cluster, lost: str) -> None:
    cluster.start("AABB")
    cluster.lose(lost)
    assert cluster.start("AABB", (30,)) == restored(20, 4)
    assert "2 parts copied from other nodes" in cluster.reasons[-1]
    assert cluster.start("AABB", ()) == restored(30, 4), "and has replicas again"
    assert "copied" not in cluster.reasons[-1], "nothing is copied that is there"


def test_another_node_takes_its_place(cluster: Cluster) -> None:
    cluster.start("ABC")
    cluster.lose("B")
    assert cluster.start("ADC") == restored(20, 3)


def test_two_nodes_are_lost_with_two_replicas_but_not_with_one(tmp_path: Path) -> None:
    for copies in (1, 2):
        (tmp_path / str(copies)).mkdir()
        cluster = Cluster(tmp_path / str(copies), copies)
        cluster.start("ABC")
        cluster.lose("B")
        cluster.lose("A")
        expected = [(0, "from scratch", 0.0)] * 3 if copies == 1 else restored(20, 3)
        assert cluster.start("ABC") == expected


def test_fewer_and_more_nodes_reshard_from_memory(cluster: Cluster) -> None:
    cluster.start("AABB")
    cluster.lose("B")
    assert {(step, where) for step, where, _ in cluster.start("AA", (30, 40))} == {(20, "in memory")}
    assert {(step, where) for step, where, _ in cluster.start("AABB", ())} == {(40, "in memory")}
    assert "2 parts copied" in cluster.reasons[-1], "once for the node, not for each of its ranks"
    assert "resharded from 2 ranks" in cluster.reasons[-1]


def test_uneven_nodes(cluster: Cluster) -> None:
    cluster.start("AAAB")
    cluster.lose("A")
    assert cluster.start("AAAB") == restored(20, 4)


def test_a_damaged_state_is_replaced_by_its_replica(cluster: Cluster) -> None:
    cluster.start("AB")
    [slot] = [slot for slot in find_staged_slots(cluster.memory("A")) if (slot.rank, slot.header.step) == (0, 20)]
    with open(slot.data, "r+b") as stream:
        stream.seek(5)
        stream.write(b"\xff")
    assert cluster.start("AB") == restored(20, 2)
    assert "1 parts copied" in cluster.reasons[-1]


def test_a_damaged_replica_is_not_restored(cluster: Cluster) -> None:
    cluster.start("AB")
    cluster.lose("A")
    [slot] = [slot for slot in find_staged_slots(cluster.memory("B")) if slot.replica and slot.header.step == 20]
    with open(slot.data, "r+b") as stream:
        stream.seek(5)
        stream.write(b"\xff")
    assert cluster.start("AB") == restored(10, 2)


def test_replicas_are_off_on_one_node_if_turned_off_and_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (nodes, copies) in enumerate([("AA", 1), ("AB", 0), ("AB", 1)]):
        (tmp_path / str(number)).mkdir()
        if number == 2:
            monkeypatch.delenv(JOB_SECRET_VARIABLE)
        cluster = Cluster(tmp_path / str(number), copies)
        cluster.start(nodes)
        assert not any(slot.replica for node in nodes for slot in find_staged_slots(cluster.memory(node)))
        assert cluster.start(nodes) == restored(20, 2)


def test_without_space_for_replicas_the_own_states_stay(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replicas, "ReplicaSlots", full)
    cluster.start("AB")
    assert "not enough space for replicas" in capsys.readouterr().err
    assert cluster.start("AB") == restored(20, 2)


def test_the_listing_names_replicas_and_those_of_no_current_rank_are_removed(cluster: Cluster) -> None:
    cluster.start("ABC")
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
