"""Where replicas are: no node may hold the only copies of anything."""

from __future__ import annotations

import pytest

from zero2all.checkpoint.replicas import plan_replicas

EVEN = [[node for node in range(nodes) for _ in range(each)] for nodes in (2, 3, 5, 128) for each in (1, 2, 8)]
UNEVEN = [[0, 0, 0, 1], [0, 1, 1, 1, 1], [2, 0, 0, 1], [0, 1, 0, 1, 2], [*range(7), 0, 0, 3, 3, 3]]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("nodes", [*EVEN, *UNEVEN], ids=lambda nodes: f"{len(nodes)}-on-{len(set(nodes))}")
def test_the_loss_of_a_node_loses_no_state(nodes: list[int], copies: int) -> None:
    plan = plan_replicas(nodes, copies)
    for rank, holders in enumerate(plan):
        assert len(holders) == min(copies, len(set(nodes)) - 1)
        at = [nodes[holder] for holder in holders]
        assert nodes[rank] not in at, "a replica beside its original is lost with it"
        assert len(set(at)) == len(at), "two replicas on one node"
    for lost in set(nodes):
        for rank, holders in enumerate(plan):
            assert any(nodes[place] != lost for place in (rank, *holders))


@pytest.mark.parametrize("nodes", EVEN, ids=lambda nodes: f"{len(nodes)}-on-{len(set(nodes))}")
def test_every_rank_holds_equally_many(nodes: list[int]) -> None:
    held = [holder for holders in plan_replicas(nodes, 2) for holder in holders]
    assert len({held.count(rank) for rank in range(len(nodes))}) == 1


def test_there_are_no_replicas_on_one_node_and_none_if_turned_off() -> None:
    assert plan_replicas([0, 0, 0], copies=2) == [(), (), ()]
    assert plan_replicas([0, 1], copies=0) == [(), ()]
    assert plan_replicas("AABB", copies=2) == [(2,), (3,), (0,), (1,)]
