"""Aborts by NCCL's watchdog are told from aborts of the rank itself, by lines as torch 1.13 to 2.9 have written them.

No GPU is needed: the lines are from public issues of PyTorch, NCCL and trainers, with hosts and paths cut.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from zero2all.cluster.launch.exit_reason import classify_exit, explain_abort
from zero2all.cluster.launch.failure_report import last_lines
from zero2all.cluster.launch.node_failures import CLASSIFIED_LINES

CPP = "ProcessGroupNCCL.cpp"
TIMEOUT = "Watchdog caught collective operation timeout: "
WORK = TIMEOUT + (
    "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) "
    "ran for 600020 milliseconds before timing out."
)
OLD_WORK = TIMEOUT + (
    "WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1805457 milliseconds before timing out."
)
SIGNAL = (
    "Received a dump signal due to a collective timeout from{} and we will try our best to dump the debug info. "
    "Last enqueued NCCL work: 136, last completed NCCL work: 136.This is most likely caused by incorrect usages of "
    "collectives, e.g., wrong sizes used across ranks, the order of collectives is not same for all ranks or the "
    "scheduled collective, for some reason, didn't run. Additionally, this can be caused by GIL deadlock or other "
    "reasons such as network errors or bugs in the communications library (e.g. NCCL), etc."
)
MONITOR = (
    "ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives. "
    "This typically indicates a NCCL/CUDA API hang blocking the watchdog, and could be triggered by another thread "
    "holding the GIL inside a CUDA api, or other deadlock-prone behaviors."
)
IB = "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129"
TERMINATE = "terminate called after throwing an instance of '{}'"

CASES = {
    "torch 2.7, with the line that names the group": (
        [
            f"[rank1]:[E626 06:24:44.903881913 {CPP}:616] [Rank 1] {WORK}",
            f"[rank1]:[E626 06:24:44.906457629 {CPP}:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an "
            "error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed: 807.",
        ],
        "cut off",
        "waited 600 s for another rank in ALLREDUCE number 808 of 9,801,523 elements of group default_pg",
    ),
    "torch 2.8": (
        [
            f"[rank7]:[E901 05:20:03.123992144 {CPP}:632] [Rank 7] {WORK}",
            f"[rank7]:[E901 05:20:03.124073319 {CPP}:2271] [PG ID 4 PG GUID 12(mesh_tp) Rank 7]  failure detected by "
            "watchdog at work sequence id: 808 PG status: last enqueued work: 811, last completed work: 807",
        ],
        "cut off",
        "of group mesh_tp: ended by NCCL's watchdog",
    ),
    "torch 2.3, with the number of the group": (
        [
            f"[rank0]:[E321 02:07:08.408271257 {CPP}:607] [Rank 0] {WORK}",
            f"[rank0]:[E321 02:07:08.465150152 {CPP}:1664] [PG 1 Rank 0] Exception (either an error or timeout) "
            "detected by watchdog at work: 808, last enqueued NCCL work: 1582, last completed NCCL work: 1579.",
        ],
        "cut off",
        "of group 1:",
    ),
    "torch 1.13": (
        [f"[E {CPP}:737] [Rank 3] {OLD_WORK}", TERMINATE.format("std::runtime_error")],
        "cut off",
        "waited 1805 s for another rank in BROADCAST number 10: ended",
    ),
    "only what() is left": (
        [
            TERMINATE.format("c10::DistBackendError"),
            f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group "
            f"watchdog thread terminated with exception: [Rank 1] {WORK}",
        ],
        "cut off",
        "of group default_pg",
    ),
    "another rank noticed first": (
        [f"[rank5]:[E723 01:58:45.667 {CPP}:1743] [PG ID 0 PG GUID 0(default_pg) Rank 5] {SIGNAL.format('  rank 2')}"],
        "cut off",
        "ended with rank 2, whose collective timed out",
    ),
    "this rank noticed, and its line is lost": (
        [
            f"[rank1]:[E418 01:32:50.9 {CPP}:1890] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
            f"{SIGNAL.format(' this local rank')}"
        ],
        "cut off",
        "waited too long for another rank",
    ),
    "a lost connection": (
        [
            TERMINATE.format("std::runtime_error"),
            "  what():  NCCL error: remote process exited or there was a network error, NCCL version 2.14.3",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "Last error:",
            IB,
        ],
        "cut off",
        "lost its connection to another rank",
    ),
    "a lost connection that NCCL calls internal": (
        [
            "  what():  [PG ID 0 PG GUID 0 Rank 3] Process group watchdog thread terminated with exception: NCCL "
            f"error in: {CPP}:1275, internal error, NCCL version 2.14.3",
            "ncclInternalError: Internal check failed.",
            "Last error:",
            "Net : Connection closed by remote peer user<50260>",
        ],
        "cut off",
        "lost its connection to another rank",
    ),
    "NCCL_DEBUG=WARN": (
        [
            "node-22:183006:183220 [1] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> "
            "failed : Broken pipe"
        ],
        "cut off",
        "lost its connection to another rank",
    ),
    "a kernel of this rank failed": (
        [
            f"[rank1]:[E410 01:50:33.889423318 {CPP}:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group "
            "watchdog thread terminated with exception: CUDA error: unspecified launch failure",
            "CUDA kernel errors might be asynchronously reported at some other API call, so the time is unknown",
        ],
        "crash",
        "its GPU failed: CUDA error: unspecified launch failure",
    ),
    "a kernel of this rank failed, and others timed out later": (
        [
            f"[E {CPP}:916] [Rank 7] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC "
            "error encountered",
            f"[rank7]:[E410 01:50:33.9 {CPP}:1743] [PG 0 Rank 7] {SIGNAL.format('  rank 2')}",
        ],
        "crash",
        "uncorrectable ECC",
    ),
    "no memory": (
        ["[PG 0 Rank 0] Process group watchdog thread terminated with exception: CUDA error: out of memory"],
        "out of memory",
        "CUDA error: out of memory",
    ),
    "a call that does not return": (
        [
            f"[rank1]:[E {CPP}:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated after "
            "dumping debug info. workMetaList_.size()=103",
            f"[rank1]:[F {CPP}:1169] [PG 0 Rank 1] {MONITOR}",
        ],
        "hang",
        "did not return",
    ),
}
FRAMES = [
    f"frame #{n}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x105 (0x71840d in libtorch_cuda.so)" for n in range(9)
]
OWN_ABORTS = [
    ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"],
    ["malloc(): corrupted top size"],
    # A warning about the store is a consequence of whatever ended the job.
    [
        "  what():  std::bad_alloc",
        f"[rank8]:[W318 10:00:41.929037914 {CPP}:1771] [PG ID 0 PG GUID 0 Rank 8] Failed to check the 'should dump' "
        "flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection reset by peer",
    ],
]


@pytest.mark.parametrize("case", CASES)
def test_an_abort_is_explained(case: str) -> None:
    lines, kind, words = CASES[case]
    reason = classify_exit(-6, "", log=["step 7: loss 2.31", *lines, *FRAMES, "Fatal Python error: Aborted"])
    assert reason.kind == kind
    assert words in reason.description
    assert "exit status 134" in reason.description


@pytest.mark.parametrize("lines", OWN_ABORTS)
def test_an_abort_for_other_reasons_stays_a_crash(lines: list[str]) -> None:
    assert explain_abort([*lines, *FRAMES]) is None
    assert classify_exit(-6, "", log=lines).kind == "crash"
    assert classify_exit(-11, "", log=CASES["torch 2.8"][0]).kind == "crash", "only SIGABRT is the watchdog's"


def test_the_rank_that_noticed_first_has_the_earliest_time() -> None:
    def when(clock: str) -> float:
        found = explain_abort([f"[rank1]:[E{time.strftime('%-m%d')} {clock} {CPP}:616] [Rank 1] {WORK}"])
        return found.time

    assert when("06:24:44.903881913") - when("06:24:44.159932949") == pytest.approx(0.743948964, abs=1e-5)
    assert 0 <= time.time() - when(time.strftime("%H:%M:%S") + ".0") < 60
    undated = explain_abort([f"[E {CPP}:737] [Rank 3] {OLD_WORK}"])
    assert undated.time == 0.0


def test_the_reason_is_found_before_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """faulthandler writes some hundred lines after it."""
    log = tmp_path / "stderr.log"
    stacks = [f'  File "/x/site-packages/torch/nn/modules/module.py", line {n} in _call_impl' for n in range(600)]
    log.write_text("\n".join([*CASES["torch 2.8"][0], *FRAMES, "Fatal Python error: Aborted", *stacks]))
    assert classify_exit(-6, "", log=last_lines(log, CLASSIFIED_LINES)).kind == "cut off"
