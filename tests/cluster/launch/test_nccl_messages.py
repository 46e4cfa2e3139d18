"""Exit statuses, messages and logs of ranks are classified: NCCL's watchdog is told from the rank itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from zero2all.cluster.launch.exit_reason import classify_exit, explain_abort, oom_kills
from zero2all.cluster.launch.failure_report import last_lines
from zero2all.cluster.launch.node_failures import CLASSIFIED_LINES

CASES = yaml.safe_load(Path(__file__).with_name("nccl_aborts.yaml").read_text(encoding="utf-8"))
FRAMES = [
    f"frame #{n}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x105 (0x71840d in libtorch_cuda.so)" for n in range(9)
]
OWN_ABORTS = [
    ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"],
    ["malloc(): corrupted top size"],
    # A warning about the store is a consequence of whatever ended the job.
    [
        "  what():  std::bad_alloc",
        "[rank8]:[W318 10:00:41.929037914 ProcessGroupNCCL.cpp:1771] [PG ID 0 PG GUID 0 Rank 8] Failed to check the "
        "'should dump' flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection reset",
    ],
]


@pytest.mark.parametrize("case", CASES)
def test_an_abort_is_explained(case: str) -> None:
    lines = ["step 7: loss 2.31", *CASES[case]["lines"], *FRAMES, "Fatal Python error: Aborted"]
    reason = classify_exit(-6, "", log=lines)
    assert reason.kind == CASES[case]["kind"]
    assert CASES[case]["words"] in reason.description
    assert "exit status 134" in reason.description


@pytest.mark.parametrize("lines", OWN_ABORTS)
def test_an_abort_for_other_reasons_stays_a_crash(lines: list[str]) -> None:
    assert explain_abort([*lines, *FRAMES]) is None
    assert classify_exit(-6, "", log=lines).kind == "crash"
    assert classify_exit(-11, "", log=CASES["torch 2.8"]["lines"]).kind == "crash", "only SIGABRT is the watchdog's"


def test_the_rank_that_noticed_first_has_the_earliest_time() -> None:
    line = CASES["torch 2.7, with the line that names the group"]["lines"][0]

    def when(clock: str) -> float:
        return explain_abort([line.replace("E626 06:24:44.903881913", f"E{time.strftime('%-m%d')} {clock}")]).time

    assert when("06:24:44.903881913") - when("06:24:44.159932949") == pytest.approx(0.743948964, abs=1e-5)
    assert 0 <= time.time() - when(time.strftime("%H:%M:%S") + ".0") < 60
    assert explain_abort(CASES["torch 1.13"]["lines"][:1]).time == 0.0, "without a date"


def test_the_reason_is_found_before_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """faulthandler writes some hundred lines after it."""
    log = tmp_path / "stderr.log"
    stacks = [f'  File "/x/site-packages/torch/nn/modules/module.py", line {n} in _call_impl' for n in range(600)]
    log.write_text("\n".join([*CASES["torch 2.8"]["lines"], *FRAMES, "Fatal Python error: Aborted", *stacks]))
    assert classify_exit(-6, "", log=last_lines(log, CLASSIFIED_LINES)).kind == "cut off"


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:54689: Connection reset by peer"


DIST_BACKEND = "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {}\n{}"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
CLOSED = "ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer node2<50260>"
WORK = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
    "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("status", "message", "kind", "words"),
    [
        (-9, "", "crash", "SIGKILL (exit status 137)"),
        (137, "", "crash", "SIGKILL (exit status 137)"),
        (-11, "", "crash", "segmentation fault"),
        (139, "", "crash", "SIGSEGV (exit status 139)"),
        (-7, "", "crash", "/dev/shm is full"),
        (-34, "", "crash", "exit status 162"),
        (1, "Interrupted: stopped after step 5", "stopped", "its state saved"),
        (2, "RecipeError: 1 mistake", "wrong usage", "exit status 2"),
        (1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory", "more memory"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to", "out of memory", "more memory"),
        (1, GLOO, "cut off", "lost its connection"),
        (1, "RuntimeError: Timed out waiting 600000ms for recv operation to complete", "cut off", "time-out"),
        (1, "DistBackendError: NCCL error: remote process exited or there was a network error", "cut off", "lost"),
        (1, DIST_BACKEND.format("remote process exited or there was a network error", REMOTE), "cut off", "lost"),
        (1, DIST_BACKEND.format("internal error", CLOSED), "cut off", "lost its connection"),
        (1, DIST_BACKEND.format("invalid usage", "Duplicate GPU detected"), "crash", "raised an error"),
        (1, f"RuntimeError: NCCL communicator was aborted on rank 2.  Original reason: {WORK}", "cut off", "lost"),
        (1, "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", "cut off", "lost"),
        (1, "AcceleratorError: CUDA error: an illegal memory access was encountered", "crash", "raised an error"),
        (1, "ValueError: no", "crash", "raised an error"),
        (7, "", "crash", "exit status 7"),
        (126, "", "crash", "exit status 126: the command cannot be executed"),
        (127, "", "crash", "exit status 127: the command was not found"),
        (128, "", "crash", "exit status 128: no signal; in a container on Kubernetes, usually a device or driver"),
        (143, "", "crash", "SIGTERM (exit status 143)"),
        (255, "", "crash", "exit status 255: exit(-1)"),
    ],
)
def test_an_exit_is_classified(status: int, message: str, kind: str, words: str) -> None:
    reason = classify_exit(status, message)
    assert reason.kind == kind
    assert words in reason.description


def test_a_kill_by_the_kernel_is_out_of_memory() -> None:
    assert classify_exit(-9, "", oom_killed=True).kind == "out of memory"
    assert oom_kills() >= 0
