"""Collectives on Python objects over a tree of small groups: the same results as over one group of all ranks."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint import RankGroup, rank_group
from zero2all.checkpoint.rank_tree import RankTree, pack, unpack
from zero2all.torch_private import HashStore


@given(st.dictionaries(st.integers(0, 2**40), st.binary(max_size=50)))
@settings(max_examples=50)
def test_packed_parts_are_unpacked_unchanged(parts: dict[int, bytes]) -> None:
    assert unpack(pack(parts)) == parts


@pytest.mark.parametrize(("world_size", "fan_out"), [(2, 1), (2, 32), (7, 2), (13, 3), (9, 8)])
def test_every_shape_of_tree_gathers_and_broadcasts(world_size: int, fan_out: int) -> None:
    """As threads of one process. Sizes that fill no level, payloads of every length and none."""
    store, found = HashStore(), dict[int, tuple[Any, ...]]()

    def rank_main(rank: int) -> None:
        tree = RankTree(store, rank, world_size, timedelta(seconds=60), fan_out)
        gathered = tree.gather(bytes([rank]) * rank)
        shared = tree.broadcast(b"from the first" if rank == 0 else b"")
        found[rank] = (gathered, shared, tree.broadcast(b""))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert dict(sorted(found[0][0].items())) == {rank: bytes([rank]) * rank for rank in range(world_size)}
    for rank in range(world_size):
        assert found[rank][1:] == (b"from the first", b"")


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
    found = group.on_all_ranks(lambda: {"rank": rank, "path": Path("a") / str(rank)})
    in_thread: list[Any] = []
    thread = threading.Thread(target=lambda: in_thread.extend(second.on_all_ranks(lambda: rank)))
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
        "unpicklable": failure(lambda: group.on_all_ranks(lambda: (lambda: None) if rank == 1 else None))[:40],
        "after": group.on_all_ranks(lambda: rank),
    }


def test_a_rank_group_has_the_results_of_one_group_and_few_sockets() -> None:
    """Three ranks in a tree of one child each, of which one fails: all of them know why."""
    for rank, found in enumerate(run_ranks(3, use_rank_group)):
        assert found["equal"]
        assert found["lazy"] == ([rank, 10 + rank, 20 + rank], [3, 33, 63])
        assert found["in_thread"] == found["after"] == [0, 1, 2]
        assert found["first"] == "of 0"
        assert found["failure"] == ("ValueError: no 2" if rank == 2 else "Z2aError: no 2 (on rank 2)")
        reason = "PicklingError|AttributeError" if rank == 1 else "Z2aError"
        assert re.match(f"({reason}): Can't (get|pickle) ", found["unpicklable"])
        assert found["opened"] <= 2 * 2 * 3, "for each of two groups a parent and a child, and what listens"
