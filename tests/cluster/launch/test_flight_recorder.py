"""Which collective a rank waits in, from dumps as gloo and NCCL make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero2all.base.machine import devices as hardware
from zero2all.cluster.launch import worker
from zero2all.cluster.launch.flight_recorder import current_collective, merge_dumps, pending_on_device, read_collectives
from zero2all.cluster.launch.hang_detection import HungRank, find_hang_culprits, waits_in_collective
from zero2all.cluster.launch.stragglers import read_arrival_times
from zero2all.cluster.launch.worker import collectives_path

GROUP = ["0", "default_pg"]


def entry(name: str, number: int, state: str = "completed", time: int = 0, **more: Any) -> dict[str, Any]:
    """As the recorder of torch 2.13 writes it; the fields that nobody reads are left out, except one."""
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "process_group": GROUP,
        "time_created_ns": time or number,
        "state": state,
        "retired": True,
        **more,
    }


def dump(*entries: dict[str, Any]) -> str:
    return json.dumps({"version": "2.10", "entries": entries})


def stack(file: Path, line: int, name: str = "train_step") -> str:
    return f'Current thread 0x00007f (most recent call first):\n  File "{file}", line {line} in {name}\n'


@pytest.fixture
def train_step(tmp_path: Path) -> Path:
    """A step that reads its metrics in line 2, and its batch in line 3."""
    source = tmp_path / "trainer.py"
    source.write_text("def train_step():\n    loss = sums.tolist()\n    batch = queue.get()\n")
    return source


def test_entries_of_both_backends_are_in_the_order_of_time() -> None:
    nccl = dump(entry("nccl:all_gather", 1, time=10), entry("nccl:all_reduce", 2, time=30)).encode()
    gloo = dump(entry("gloo:all_reduce", 1, "scheduled", time=20)).encode()
    merged = read_collectives(merge_dumps([nccl, gloo, b""], {}, 0).decode())
    assert [one.profiling_name for one in merged] == ["nccl:all_gather", "gloo:all_reduce", "nccl:all_reduce"]
    assert read_collectives("") == read_collectives("{}") == read_collectives("no JSON") == []
    assert read_collectives(json.dumps({"entries": [{"name": "of another version"}]})) == []


def test_a_rank_is_in_the_first_collective_that_its_device_has_not_completed() -> None:
    launched = read_collectives(
        dump(entry("nccl:a", 1), entry("nccl:b", 2, "started"), entry("nccl:c", 3, "scheduled"))
    )
    assert str(current_collective(launched)) == "nccl:b number 2 of group default_pg"
    in_gloo = read_collectives(dump(entry("gloo:a", 1, "scheduled"), entry("gloo:b", 2, "scheduled")))
    assert str(current_collective(in_gloo)) == "gloo:b number 2 of group default_pg"
    assert pending_on_device(in_gloo) == []
    assert current_collective([]) is None


def test_parts_of_a_coalesced_collective_are_over_with_it() -> None:
    parts = [entry("nccl:send", 1, "scheduled", is_p2p=True, p2p_seq_id=7), entry("nccl:coalesced", 2)]
    assert pending_on_device(read_collectives(dump(*parts))) == []
    (waiting,) = pending_on_device(read_collectives(dump(parts[0])))
    assert str(waiting) == "nccl:send number 7 of group default_pg"


def test_a_host_that_waits_for_a_collective_on_its_device_waits(train_step: Path) -> None:
    pending = read_collectives(dump(entry("nccl:all_reduce", 4, "started")))
    completed = read_collectives(dump(entry("nccl:all_reduce", 4)))
    gloo = read_collectives(dump(entry("gloo:all_reduce", 4, "scheduled")))
    reads_metrics, reads_batch = stack(train_step, 2), stack(train_step, 3)
    assert waits_in_collective(reads_metrics, pending)
    assert waits_in_collective(reads_batch, pending), "the device waits, wherever the host is"
    assert waits_in_collective(reads_metrics, []), "no record of NCCL"
    assert waits_in_collective(reads_metrics, gloo), "no record of NCCL"
    assert waits_in_collective(stack(Path("/x/torch/cuda/__init__.py"), 1, "synchronize"), [])
    assert waits_in_collective(stack(Path("/x/torch/distributed/distributed_c10d.py"), 1, "all_reduce"), gloo)
    assert not waits_in_collective(reads_metrics, completed), "its own kernel is stuck"
    assert not waits_in_collective(reads_batch, completed)
    assert not waits_in_collective(reads_batch, [])
    assert not waits_in_collective("", [])


def test_on_gpus_the_rank_that_reads_no_batch_is_named(train_step: Path) -> None:
    """All others wait in .tolist() for an all-reduce that this rank has not begun."""

    def hung(rank: int, line: int, *entries: dict[str, Any]) -> HungRank:
        collectives = read_collectives(dump(*entries))
        waits = waits_in_collective(stack(train_step, line), collectives)
        return HungRank(rank, 7, "S", "", waits, str(current_collective(collectives) or ""), "")

    others = [hung(rank, 2, entry("nccl:a", 1), entry("nccl:b", 2, "started")) for rank in (0, 1, 3)]
    (culprit,) = find_hang_culprits([*others, hung(2, 3, entry("nccl:a", 1))])
    assert (culprit.rank, culprit.why) == (2, "is not in the collective that the others wait in")
    (culprit,) = find_hang_culprits([*others, hung(2, 2, entry("nccl:a", 1), entry("nccl:c", 2, "started"))])
    assert (culprit.rank, culprit.why) == (2, "is in another collective than the others")
    assert find_hang_culprits(others) == []


def test_arrival_times_include_those_of_nccl(tmp_path: Path) -> None:
    collectives_path(tmp_path, 0).write_text(dump(entry("nccl:all_reduce", 5, time=2_000_000_000)))
    assert read_arrival_times(tmp_path, 0) == {("0", "nccl:all_reduce", 5): 2.0}
    assert read_arrival_times(tmp_path, 1) == {}


def test_arrivals_in_groups_of_one_name_are_not_compared(tmp_path: Path) -> None:
    """Groups of one mesh dimension that were split have one name."""
    for local, ranks in enumerate(([0, 1], [0, 1], [2, 3])):
        one = entry("nccl:all_reduce", 5, time=2_000_000_000)
        collectives_path(tmp_path, local).write_bytes(merge_dumps([dump(one).encode()], {"0": ranks}, 0))
    arrivals = [set(read_arrival_times(tmp_path, local)) for local in range(3)]
    assert arrivals[0] == arrivals[1] != arrivals[2]


def test_a_dump_that_fails_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(worker, "_flight_recorder", fail)
    assert worker._try_dump() == b"{}"


def test_a_dump_is_made_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that dumps was started before the rank chose its device."""
    chosen: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        "zero2all.base.torch_private.dump_flight_recorders", lambda: [dump(entry("nccl:a", 1)).encode()]
    )
    assert len(read_collectives(worker._flight_recorder().decode())) == 1
    assert chosen == [torch.device("cuda", 3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    hardware.use_rank_device()
    assert len(chosen) == 1
