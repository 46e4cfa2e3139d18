"""Exit statuses and messages of ranks are classified."""

from __future__ import annotations

import pytest

from zero2all.cluster.launch.exit_reason import classify_exit, oom_kills

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
