"""Which rank a hang is due to: by traces in the format of torch 2.13's NCCL recorder, and by real ones of gloo.

The former are written here field by field, as FlightRecorderDetail.hpp of torch 2.13 writes them: there is no GPU to
record them on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from zero2all.base.records import parse_record, to_json
from zero2all.cluster.launch.flight_recorder import GroupTrace, find_causes, merge_dumps, read_group_traces, show_ranks
from zero2all.cluster.launch.hang_detection import HungRank, find_hang_culprits

SHAPES = {"_all_gather_base": ([1024], [4096]), "_reduce_scatter_base": ([4096], [1024])}
# Two ranks of tensor parallelism, four of FSDP. The groups of one mesh dimension have one name: they were split.
GROUPS = {
    rank: {"0": range(8), "2": range(rank % 2, 8, 2), "3": (rank // 2 * 2, rank // 2 * 2 + 1)} for rank in range(8)
}
NAMES = {"0": "default_pg", "2": "mesh_dp_shard", "3": "mesh_tp"}


def entry(group: str, name: str, number: int, state: str = "completed", **more: Any) -> dict[str, Any]:
    """All fields of an entry, in the order of nlohmann's JSON."""
    sent, received = SHAPES.get(name.partition(":")[2], ([8, 512], [8, 512]))
    is_p2p = "->" in name or "<-" in name
    return {
        "collective_seq_id": 0 if is_p2p else number,
        "input_dtypes": ["BFloat16"],
        "input_sizes": [sent],
        "is_p2p": is_p2p,
        "op_id": number,
        "output_dtypes": ["BFloat16"],
        "output_sizes": [received],
        "p2p_seq_id": number if is_p2p else 0,
        "pg_id": int(group),
        "process_group": [group, NAMES[group]],
        "profiling_name": name,
        "record_id": number,
        "retired": state == "completed",
        "state": state,
        "thread_id": "140138659113856",
        "thread_name": "pt_autograd_0",
        "time_created_ns": 1_794_941_176_000_000_000 + number,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 900_000,
        **more,
    }


def trace(rank: int, entries: Iterable[dict[str, Any]]) -> list[GroupTrace]:
    """Through the same merge as in a rank: here NCCL's own configuration names the ranks of each group."""
    config = {
        name: {"desc": NAMES[name], "name": name, "ranks": str(list(ranks))} for name, ranks in GROUPS[rank].items()
    }
    nccl = {
        "comm_lib_version": "2.28.9",
        "entries": list(entries),
        "nccl_comm_state": {},
        "pg_config": config,
        "pg_status": {"2": {"last_completed_collective": "11", "last_enqueued_collective": "12"}},
        "version": "2.10",
    }
    gloo = {"pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}}, "version": "2.10"}
    dumps = [json.dumps(dump).encode() for dump in (nccl, gloo)]
    return read_group_traces(merge_dumps(dumps, {}, main_thread=1).decode())


def step(rank: int, tp: tuple[int, str] = (40, "completed"), dp: tuple[int, str] = (12, "started")) -> list[GroupTrace]:
    """A rank that reached an all-reduce of its tensor-parallel group and a reduce-scatter of FSDP."""
    tensor = [entry("3", "nccl:all_reduce", number) for number in range(tp[0] - 6, tp[0])]
    shards = [entry("2", "nccl:_all_gather_base", number) for number in range(dp[0] - 6, dp[0])]
    return trace(
        rank,
        [*tensor, *shards, entry("3", "nccl:all_reduce", *tp), entry("2", "nccl:_reduce_scatter_base", *dp)],
    )


WAITING = {rank: step(rank) for rank in range(8)}


def causes(**changed: list[GroupTrace]) -> dict[int, str]:
    traces = {**WAITING, **{int(name.removeprefix("rank")): groups for name, groups in changed.items()}}
    return {cause.rank: cause.why for cause in find_causes(traces, heard_all=True)}


def cause_of(rank: int, **changed: list[GroupTrace]) -> str:
    """Why it, and no other rank, is the cause."""
    found = causes(**changed)
    assert list(found) == [rank]
    return found[rank]


def test_all_in_one_collective_is_nobody_s_fault() -> None:
    assert causes() == {}


def test_a_rank_whose_kernel_is_stuck_is_found_through_its_groups() -> None:
    """Its host has launched everything; rank 4 waits for it in tp, and holds up its own FSDP group."""
    why = cause_of(
        5,
        rank5=step(5, tp=(40, "scheduled"), dp=(12, "scheduled")),
        rank4=step(4, tp=(40, "started"), dp=(12, "scheduled")),
    )
    assert "its device has not come to it: a kernel before it is stuck" in why
    assert "in which ranks 1, 3 and 7 wait" in why


def test_a_rank_whose_host_is_stuck_is_found_through_its_groups() -> None:
    """It has not launched the all-reduce of tp that rank 4 is in. Six others wait for these two in FSDP."""
    why = cause_of(
        5,
        rank5=step(5, tp=(39, "completed"), dp=(11, "completed")),
        rank4=step(4, tp=(40, "started"), dp=(11, "completed")),
    )
    assert why.startswith("is not in the collective that the others wait in: it has not begun nccl:")


def test_without_start_events_a_missing_rank_is_found_and_a_stuck_kernel_is_not() -> None:
    """TORCH_NCCL_ENABLE_TIMING is off by default: nothing is ever "started"."""
    scheduled = {f"rank{rank}": step(rank, dp=(12, "scheduled")) for rank in range(8)}
    assert causes(**scheduled) == {}
    assert cause_of(5, **{**scheduled, "rank5": step(5, dp=(11, "completed"))})


def test_a_rank_that_diverged_is_named_with_both_collectives() -> None:
    other = [entry("2", "nccl:_all_gather_base", 11), entry("2", "nccl:all_reduce", 12, "started")]
    why = cause_of(3, rank3=trace(3, other))
    assert "is in another collective than the others: nccl:all_reduce number 12 of group mesh_dp_shard" in why
    assert "where ranks 1, 5 and 7 began nccl:_reduce_scatter_base number 12" in why


def test_a_rank_with_another_size_is_named() -> None:
    short = entry("2", "nccl:_reduce_scatter_base", 12, "started", input_sizes=[[4092]], output_sizes=[[1023]])
    why = cause_of(6, rank6=trace(6, [entry("2", "nccl:_all_gather_base", 11), short]))
    assert "(BFloat16 [4092]), where ranks 0, 2 and 4 began" in why
    uneven = {
        f"rank{rank}": trace(rank, [entry("2", "nccl:all_to_all", 12, "started", input_sizes=[[rank]])])
        for rank in range(8)
    }
    assert causes(**uneven) == {}, "every rank sends as much as it has"


def test_two_ranks_in_different_collectives_are_both_named() -> None:
    both = {rank: trace(rank, [entry("3", f"nccl:{name}", 7, "started")]) for rank, name in ((0, "a"), (1, "b"))}
    assert [cause.rank for cause in find_causes(both, heard_all=True)] == [0, 1]


def test_a_dead_rank_is_named_once_all_nodes_have_reported() -> None:
    assert cause_of(2, rank2=[]).startswith("sent no trace: it has exited or does not answer")
    of_one_node = {rank: WAITING[rank] for rank in range(4)}
    assert find_causes(of_one_node, heard_all=False) == [], "ranks 4 to 7 report to another agent"
    assert [cause.rank for cause in find_causes(of_one_node, heard_all=True)] == [4, 5, 6, 7]


def test_a_rank_that_is_still_in_an_earlier_collective_is_named() -> None:
    why = cause_of(1, rank1=trace(1, [entry("2", "nccl:_all_gather_base", 11, "started")]))
    assert why.startswith("has not completed nccl:_all_gather_base number 11 of group mesh_dp_shard")


def test_pipeline_ranks_wait_for_the_one_that_does_not_send() -> None:
    """Rank 2 waits for rank 1, rank 1 for rank 0, which is busy."""
    first, last = (trace(rank, [entry("0", f"nccl:recv {rank}<-{rank - 1}", 5, "started")]) for rank in (1, 2))
    traces = {0: trace(0, [entry("0", "nccl:send 0->1", 4)]), 1: first, 2: last}
    (cause,) = find_causes(traces, heard_all=False)
    assert cause.rank == 0
    assert "has not begun nccl:recv 1<-0 number 5 of group default_pg" in cause.why
    both_ends = {0: trace(0, [entry("0", "nccl:send 0->1", 4, "started")]), 1: first}
    assert find_causes(both_ends, heard_all=False) == []


def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    in_tp = trace(0, [entry("3", "nccl:all_reduce", 9, "started"), entry("0", "nccl:all_reduce", 3)])
    in_world = trace(1, [entry("3", "nccl:all_reduce", 8), entry("0", "nccl:all_reduce", 4, "started")])
    found = find_causes({0: in_tp, 1: in_world}, heard_all=False)
    assert [cause.rank for cause in found] == [0, 1]
    assert "the ranks use their groups in different orders" in found[0].why


def test_a_background_thread_in_gloo_does_not_count_as_waiting() -> None:
    """The thread that writes checkpoints waits for rank 1; the rank itself is elsewhere."""
    groups = {"0": [0, 1]}
    waiting = entry("0", "gloo:all_gather", 3, "scheduled", thread_id="7")
    (main,) = read_group_traces(merge_dumps([json.dumps({"entries": [waiting]}).encode()], groups, 7).decode())
    (other,) = read_group_traces(merge_dumps([json.dumps({"entries": [waiting]}).encode()], groups, 8).decode())
    assert main.pending is not None
    assert (other.pending, other.begun) == (None, 3)


def test_the_report_names_the_cause_and_its_line() -> None:
    def hung(rank: int, groups: list[GroupTrace], state: str = "S") -> HungRank:
        return HungRank(rank, 7, state, f"x.py:{rank} in f", True, "", "", groups)

    ranks = [hung(rank, step(5, dp=(11, "completed")) if rank == 5 else WAITING[rank]) for rank in range(8)]
    ranks = [parse_record(HungRank, to_json(one), "a node report") for one in ranks]  # it travels as JSON
    (culprit,) = find_hang_culprits(ranks)
    assert (culprit.rank, culprit.line) == (5, "x.py:5 in f")
    (stopped,) = find_hang_culprits([*ranks[1:], hung(0, WAITING[0], "T")])
    assert stopped.rank == 0, "a stopped rank is the cause, wherever it is"
    (dead,) = find_hang_culprits([one for one in ranks if one.rank not in (2, 5)] + [hung(5, WAITING[5])])
    assert (dead.rank, dead.line) == (2, "")


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [([3], "rank 3 waits"), ([0, 1, 2, 3], "ranks 0-3 wait"), ([7, 0, 1, 4], "ranks 0-1, 4 and 7 wait")],
)
def test_ranks_are_listed_in_short(ranks: list[int], shown: str) -> None:
    assert show_ranks(ranks) == shown


GLOO_RANK = """
import sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from zero2all.cluster.launch.flight_recorder import merge_dumps
from zero2all.base.torch_private import dump_flight_recorders, process_group_ranks
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
store = dist.FileStore(str(directory / "store"), 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
low, high = dist.new_group([0, 1], group_desc="low"), dist.new_group([1, 2], group_desc="high")
dist.all_reduce(torch.ones(4))
def wait():
    dist.all_reduce(torch.ones(2), group=low if rank == 0 else high)
if rank < 2:
    threading.Thread(target=wait, daemon=True).start()
    main = threading.enumerate()[-1].ident
else:
    main = threading.main_thread().ident
expected = b'"retired": false' if rank < 2 else b'"entries"'
while expected not in (found := merge_dumps(dump_flight_recorders(), process_group_ranks(), main)):
    time.sleep(0.01)
(directory / f"trace-{rank}.json").write_bytes(found)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_real_traces_of_gloo_lead_to_the_rank_that_is_not_there(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another, and rank 2 for nobody."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO_RANK, str(rank), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in range(3)
    ]
    try:
        for process in ranks:
            assert process.stdout.readline() == b"ready\n"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    traces = {rank: read_group_traces((tmp_path / f"trace-{rank}.json").read_text()) for rank in range(3)}
    (cause,) = find_causes(traces, heard_all=True)
    assert cause.rank == 2
    assert "it has not begun gloo:all_reduce number 1 of group high (Float [2]), in which rank 1 waits" in cause.why
