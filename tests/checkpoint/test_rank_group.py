"""Collectives on Python objects over a tree of small groups: the same results as over one group of all ranks."""

from __future__ import annotations

import os
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
from torch.distributed.checkpoint import FileSystemReader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint import RankGroup, rank_group
from zero2all.checkpoint.dcp_writer import ShardWriter
from zero2all.checkpoint.rank_tree import RankTree, pack, unpack
from zero2all.errors import Z2aError
from zero2all.torch_private import HashStore


@given(st.dictionaries(st.integers(0, 2**40), st.binary(max_size=50)))
@settings(max_examples=50)
def test_packed_parts_are_unpacked_unchanged(parts: dict[int, bytes]) -> None:
    assert unpack(pack(parts)) == parts


@pytest.mark.parametrize(("world_size", "fan_out"), [(2, 1), (2, 32), (7, 2), (13, 3), (9, 8)])
def test_every_shape_of_tree_gathers_broadcasts_and_scatters(world_size: int, fan_out: int) -> None:
    """As threads of one process. Sizes that fill no level, payloads of every length and none."""
    store, found = HashStore(), dict[int, tuple[Any, ...]]()

    def rank_main(rank: int) -> None:
        tree = RankTree(store, rank, world_size, timedelta(seconds=60), fan_out)
        gathered = tree.gather(bytes([rank]) * rank)
        shared = tree.broadcast(b"from the first" if rank == 0 else b"")
        own = tree.scatter({other: bytes([other]) * (2 * other) for other in range(world_size)} if rank == 0 else {})
        found[rank] = (gathered, shared, own, tree.broadcast(b""))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert dict(sorted(found[0][0].items())) == {rank: bytes([rank]) * rank for rank in range(world_size)}
    for rank in range(world_size):
        assert found[rank][1:] == (b"from the first", bytes([rank]) * (2 * rank), b"")


def sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket") for link in links)


def use_rank_group() -> dict[str, Any]:
    rank_group.RankTree.__init__.__defaults__ = (2,)  # type: ignore[attr-defined]
    before, rank = sockets(), dist.get_rank()
    group, second = RankGroup(), RankGroup()
    opened = sockets() - before

    def fail_on(failing: int) -> int:
        if rank == failing:
            raise ValueError(f"no {failing}")
        return rank

    def failure(call: Any) -> str:
        with pytest.raises((ValueError, Z2aError)) as failed:
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
    return {
        "equal": found == expected,
        "opened": opened,
        "in_thread": in_thread,
        "first": group.on_rank0(lambda: f"of {rank}"),
        "failure": failure(lambda: group.on_all_ranks(lambda: fail_on(3))),
        "unpicklable": failure(lambda: group.on_all_ranks(lambda: (lambda: None) if rank == 1 else None))[:40],
        "reduced": group.reduce_scatter(lambda: rank, lambda ranks: [10 * one + len(ranks) for one in ranks]),
        "reduce failed": failure(lambda: group.reduce_scatter(lambda: fail_on(2), lambda ranks: ranks)),
        "on the first": failure(lambda: group.reduce_scatter(lambda: rank, lambda ranks: [fail_on(0)] * 5)),
        "after": group.on_all_ranks(lambda: rank),
    }


def test_a_rank_group_has_the_results_of_one_group_and_few_sockets() -> None:
    """Five ranks in a tree of two children each, of which one fails: all of them know why."""
    for rank, found in enumerate(run_ranks(5, use_rank_group)):
        assert found["equal"]
        assert found["in_thread"] == found["after"] == [0, 1, 2, 3, 4]
        assert found["first"] == "of 0"
        assert found["failure"] == ("ValueError: no 3" if rank == 3 else "Z2aError: no 3 (on rank 3)")
        assert found["reduced"] == 10 * rank + 5
        assert found["reduce failed"] == ("ValueError: no 2" if rank == 2 else "Z2aError: no 2 (on rank 2)")
        assert found["on the first"] == ("ValueError: no 0" if rank == 0 else "Z2aError: no 0")


def save_both_ways(directory: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = torch.randn(7, 3)

    def state(scale: float) -> dict[str, Any]:
        return {
            "sharded": distribute_tensor(scale * whole, mesh, [Shard(0)]),
            "copied": distribute_tensor(scale * whole, mesh, [Replicate()]),
            "same": torch.full((2,), scale),
        }

    group, writer, root = RankGroup(), ShardWriter(), Path(directory)
    calls: list[str] = []
    reduce_scatter = group.reduce_scatter

    def count(function: Any, reduce: Any) -> Any:
        calls.append("reduce_scatter")
        return reduce_scatter(function, reduce)

    group.reduce_scatter = count  # type: ignore[method-assign]
    names = writer.write(state(1.0), root / "first", group)
    first, _ = len(calls), calls.clear()
    writer.write(state(2.0), root / "second", group)  # by the plans of the first
    second, _ = len(calls), calls.clear()
    writer.write({**state(2.0), "more": torch.ones(3)}, root / "third", group)
    state_dict_saver.save(state(2.0), checkpoint_id=root / "by DCP")
    return {"names": names, "calls": (first, second, len(calls))}


def test_what_is_written_is_what_dcp_writes_and_plans_are_gathered_once(tmp_path: Path) -> None:
    found = run_ranks(3, save_both_ways, str(tmp_path))
    assert [one["calls"] for one in found] == [(2, 1, 2)] * 3, "plans and results, then results alone"
    assert [one["names"] for one in found] == [["__0_0.distcp"], ["__1_0.distcp"], ["__2_0.distcp"]]
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("second", "by DCP"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert {index: data.relative_path for index, data in ours.storage_data.items()} == {
        index: data.relative_path for index, data in theirs.storage_data.items()
    }
    torch.manual_seed(0)
    whole = torch.randn(7, 3)
    for name, scale in (("first", 1.0), ("second", 2.0), ("third", 2.0)):
        loaded: dict[str, Any] = {key: torch.zeros(7, 3) for key in ("sharded", "copied")}
        torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        assert all(torch.equal(value, scale * whole) for value in loaded.values())
    assert "more" in FileSystemReader(tmp_path / "third").read_metadata().state_dict_metadata
