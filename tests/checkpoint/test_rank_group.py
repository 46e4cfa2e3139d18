"""Collectives on Python objects over a tree of small groups: the same results as over one group of all ranks."""

from __future__ import annotations

import math
import operator
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.base.torch_private import HashStore
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint import RankGroup, rank_group, rank_tree
from zero2all.checkpoint.dcp_writer import KEY_DTYPE, _pack_writers
from zero2all.checkpoint.rank_tree import RankTree, pack, unpack
from zero2all.checkpoint.restore import RankReport, SlotReport
from zero2all.checkpoint.restore_point import RestorePointFinder
from zero2all.checkpoint.training_state import Branch


@given(st.dictionaries(st.integers(0, 2**40), st.binary(max_size=50)))
@settings(max_examples=50)
def test_packed_parts_are_unpacked_unchanged(parts: dict[int, bytes]) -> None:
    assert unpack(pack(parts)) == parts


def in_threads(ranks: int, main: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(main, range(ranks), timeout=120))


@pytest.mark.parametrize(("world_size", "fan_out"), [(2, 1), (2, 32), (7, 2), (13, 3), (9, 8)])
def test_every_shape_of_tree_gathers_and_broadcasts(world_size: int, fan_out: int) -> None:
    """As threads of one process. Sizes that fill no level, payloads of every length and none."""
    store, found = HashStore(), dict[int, tuple[Any, ...]]()

    def rank_main(rank: int) -> None:
        tree = RankTree(store, rank, world_size, timedelta(seconds=60), fan_out)
        gathered = tree.gather(bytes([rank]) * rank, b"".join)
        shared = tree.broadcast(b"from the first" if rank == 0 else b"")
        tree.gather(b"", b"".join)
        own = tree.scatter({other: bytes([other]) * other for other in range(world_size)} if rank == 0 else {})
        found[rank] = (gathered, own, shared, tree.broadcast(b""))

    in_threads(world_size, rank_main)
    assert sorted(found[0][0]) == sorted(b"".join(bytes([rank]) * rank for rank in range(world_size)))
    for rank in range(world_size):
        assert found[rank][1:] == (bytes([rank]) * rank, b"from the first", b"")


def test_a_slow_child_delays_no_other() -> None:
    """Rank 1 sends last: by then its siblings have been read, and hear from the parent without it."""
    store, read = HashStore(), threading.Event()

    def rank_main(rank: int) -> None:
        tree = RankTree(store, rank, 4, timedelta(seconds=60))
        if rank == 1:
            assert read.wait(60), "rank 0 reads its children in turn"
        tree.gather(bytes(10), b"".join)
        tree.broadcast(b"")

    original, seen = rank_tree.receive_from_any, list[int]()

    def receive(*args: Any) -> int:
        seen.append(original(*args))
        if len(seen) == 2:
            read.set()
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "receive_from_any", receive)
        in_threads(4, rank_main)
    assert seen[-1] == 1


SHARDS = 200
LINEAGE = tuple(Branch(f"{number:032x}", number) for number in range(64))


def call_as_a_restart_does(group: RankGroup) -> None:
    """What each rank exchanges when it plans a save and when it finds a state to restore."""
    keys = np.zeros(SHARDS, KEY_DTYPE)
    keys["low"] = np.arange(SHARDS) + SHARDS * group.rank
    group.reduce(lambda: False, operator.and_)
    chosen = group.scatter(keys.tobytes, _pack_writers)
    assert np.unpackbits(np.frombuffer(chosen, np.uint8), count=SHARDS).all(), "no other rank holds them"
    group.on_all_ranks(lambda: bytes(1000))
    slot = SlotReport(group.rank, group.world_size, 7, LINEAGE, "layout")
    finder = RestorePointFinder(None, None, None, None, group)  # type: ignore[arg-type]
    decision, _ = finder._decide(RankReport((slot,), "layout"), [], None, math.inf)
    assert decision.chosen.sources == ((slot,),)


def test_ranks_receive_what_they_need_and_no_more() -> None:
    """64 ranks as threads. Rank 0 gets the hashes of all shards; if every rank did, each would get as much."""
    ranks, store, groups = 64, HashStore(), dict[int, RankGroup]()

    def rank_main(rank: int) -> None:
        group = groups[rank] = RankGroup()
        group.rank, group.world_size = rank, ranks
        group._tree = RankTree(store, rank, ranks, timedelta(seconds=120))
        call_as_a_restart_does(group)

    in_threads(ranks, rank_main)
    trees = [groups[rank]._tree for rank in range(ranks)]
    received = [tree.received_bytes for tree in trees if tree is not None]
    keys = KEY_DTYPE.itemsize * SHARDS
    inner = [size for tree, size in zip(trees, received, strict=True) if tree is not None and tree.children]
    leaves = [size for tree, size in zip(trees, received, strict=True) if tree is not None and not tree.children]
    sys.stdout.write(
        f"bytes received: rank 0 {received[0]:,}, leaves at most {max(leaves):,}, total {sum(received):,}\n"
    )
    assert received[0] > ranks * keys
    assert len(inner) == 2
    assert max(leaves) < 3 * keys


def sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket") for link in links)


def use_rank_group() -> dict[str, Any]:
    rank_group.RankTree.__init__.__defaults__ = (1,)  # type: ignore[attr-defined]
    before, rank = sockets(), dist.get_rank()
    group, second = RankGroup(), RankGroup()
    opened = sockets() - before

    def fail_on(failing: int) -> int:
        if rank == failing:
            raise ValueError(f"no {failing}")
        return rank

    def failure(call: Any) -> str:
        with pytest.raises(Exception) as failed:  # noqa: PT011 - the type is in what is returned
            call()
        return f"{type(failed.value).__name__}: {failed.value}"

    expected: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(expected, {"rank": rank, "path": Path("a") / str(rank)})
    found = group.gather(lambda: {"rank": rank, "path": Path("a") / str(rank)}, list)
    in_thread: list[Any] = []
    thread = threading.Thread(target=lambda: in_thread.extend(second.gather(lambda: rank, list)))
    thread.start()  # while the main thread uses others
    total = torch.ones(1)
    dist.all_reduce(total)
    thread.join(60)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as in a job of more than a hundred ranks
    lazy = dist.new_group(backend="gloo")
    sent, received = torch.arange(3) + 10 * rank, torch.zeros(3, dtype=torch.int64)
    dist.all_to_all_single(received, sent, group=lazy)
    summed = received.clone()
    dist.all_reduce(summed, group=lazy)
    return {
        "lazy": (received.tolist(), summed.tolist()),
        "equal": found == expected,
        "opened": opened,
        "in_thread": in_thread,
        "first": group.on_rank0(lambda: f"of {rank}"),
        "failure": failure(lambda: group.on_all_ranks(lambda: fail_on(2))),
        "unpicklable": failure(lambda: group.gather(lambda: (lambda: None) if rank == 1 else None, list))[:40],
        "unsummarized": failure(lambda: group.gather(lambda: rank, lambda found: found[7])),
        "unassigned": failure(lambda: group.scatter(lambda: fail_on(1), list)),
        "own": group.on_all_ranks(lambda: [rank]),
        "sum": group.reduce(lambda: rank, operator.add),
        "part": group.scatter(lambda: rank, lambda found: [10 * value for value in found]),
        "pair": RankGroup([0, 2] if rank != 1 else [1]).gather(lambda: rank, list),
        "after": group.gather(lambda: rank, list),
    }


def test_a_rank_group_has_the_results_of_one_group_and_few_sockets() -> None:
    """Three ranks in a tree of one child each, of which one fails: all of them know why."""
    for rank, found in enumerate(run_ranks(3, use_rank_group)):
        assert found["equal"]
        assert found["lazy"] == ([rank, 10 + rank, 20 + rank], [3, 33, 63])
        assert found["in_thread"] == found["after"] == [0, 1, 2]
        assert found["first"] == "of 0"
        assert found["failure"] == ("ValueError: no 2" if rank == 2 else "Z2aError: no 2 (on rank 2)")
        assert (found["own"], found["sum"], found["part"]) == ([rank], 3, 10 * rank)
        assert found["pair"] == ([1] if rank == 1 else [0, 2])
        at_rank0 = (
            "IndexError: list index out of range" if rank == 0 else "Z2aError: list index out of range (on rank 0)"
        )
        assert found["unsummarized"] == at_rank0
        assert found["unassigned"] == ("ValueError: no 1" if rank == 1 else "Z2aError: no 1 (on rank 1)")
        reason = "PicklingError|AttributeError" if rank == 1 else "Z2aError"
        assert re.match(f"({reason}): Can't (get|pickle) ", found["unpicklable"])
        assert found["opened"] <= 2 * 2 * 3, "for each of two groups a parent and a child, and what listens"
