"""How long the agent waits for ranks that must stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero2all.base.environment import AGENT_DIR_VARIABLE
from zero2all.cluster.launch.exit_reason import classify_exit
from zero2all.cluster.launch.hang_detection import request_abort
from zero2all.cluster.launch.heartbeat import HeartbeatStatus, StartupPhase, create_heartbeat
from zero2all.cluster.launch.rank_shutdown import PEER_LOSS_TIMEOUT, RankShutdown


class PeerLoss:
    """A rendezvous that reports a lost peer since ``seconds``."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def seconds_since_peer_loss(self) -> float | None:
        return self.seconds


class WatchedRanks:
    """One rank that runs for ever, and may be saving."""

    def __init__(self, saving: bool) -> None:
        self.phase_times = tuple(1.0 if saving and phase == StartupPhase.ENDING else 0.0 for phase in StartupPhase)

    def running(self) -> dict[int, int]:
        return {0: 1}

    def statuses(self) -> dict[int, HeartbeatStatus]:
        return {0: HeartbeatStatus(5, 4, 0.0, self.phase_times)}


def rank_shutdown(rendezvous: PeerLoss, ranks: WatchedRanks) -> RankShutdown:
    return RankShutdown(ranks, rendezvous, Path("/nonexistent"), grace=110.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "saving", "waits"),
    [
        (None, False, 110.0),  # they may be saving, or about to
        (0.5, False, None),  # they may still notice it
        (PEER_LOSS_TIMEOUT + 1, False, 0.0),  # they block in a collective that never ends
        (PEER_LOSS_TIMEOUT + 1, True, 109.0 - PEER_LOSS_TIMEOUT),  # they save, and have time for it from the loss on
    ],
)
def test_ranks_whose_peer_is_lost_are_not_waited_for(
    seconds: float | None, saving: bool, waits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    rendezvous = PeerLoss(seconds)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(duration: float) -> None:
        now[0] += duration
        if rendezvous.seconds is not None:
            rendezvous.seconds += duration

    monkeypatch.setattr(time, "sleep", sleep)
    rank_shutdown(rendezvous, WatchedRanks(saving)).wait(110.0)
    assert now[0] == pytest.approx(PEER_LOSS_TIMEOUT - 0.5 if waits is None else waits, abs=0.2)


RANK = """
import ctypes, sys
from zero2all.cluster.launch.worker import setup_worker
setup_worker()
import zero2all.base.torch_private as private
private.has_nccl_groups = lambda: sys.argv[1] == "nccl"
# A stand-in for NCCL: to abort takes for ever, as it may.
private.abort_nccl_groups = lambda: (print("aborting", flush=True), ctypes.CDLL(None).sleep(60))
print("asleep", flush=True)
if sys.argv[1] == "nccl":
    ctypes.CDLL(None).sleep(60)  # in native code: no signal handler of Python runs
sys.stdin.read()
"""


def test_a_rank_that_waits_for_nccl_exits_at_once_when_a_peer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, with gloo, gets an error from its collective, and must have the time to handle it."""
    processes = {}
    for local, backend in enumerate(("nccl", "gloo")):
        create_heartbeat(tmp_path, local)
        environment = {
            **os.environ, AGENT_DIR_VARIABLE: str(tmp_path), "LOCAL_RANK": str(local),
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error-{local}.json"), "Z2A_AGENT_PID": str(os.getpid()),
        }  # fmt: skip
        processes[local] = subprocess.Popen(
            [sys.executable, "-c", RANK, backend], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    try:
        for process in processes.values():
            assert process.stdout.readline() == b"asleep\n"
        begin = time.monotonic()
        for local in processes:
            request_abort(tmp_path, local)
        assert processes[0].wait(timeout=20) == 1
        assert time.monotonic() - begin < PEER_LOSS_TIMEOUT, "the agent would have killed it"
        assert processes[1].poll() is None
    finally:
        for process in processes.values():
            process.kill()
        outputs = [process.communicate()[0] for process in processes.values()]
    assert outputs == [b"aborting\n", b""]
    message = json.loads((tmp_path / "error-0.json").read_text())["message"]["message"]
    assert classify_exit(1, message).kind == "cut off"
    assert not (tmp_path / "error-1.json").exists()


def test_the_agent_asks_once_and_not_while_ranks_save(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("zero2all.cluster.launch.rank_shutdown.request_abort", lambda _, local: asked.append(local))
    for seconds, saving, expected in ((None, False, []), (0.5, True, []), (0.5, False, [0])):
        asked.clear()
        ranks = WatchedRanks(saving)
        shutdown = rank_shutdown(PeerLoss(seconds), ranks)
        for _ in range(3):
            shutdown.peers_lost(ranks.statuses())
        assert asked == expected
