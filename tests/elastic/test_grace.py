"""How long the agent waits for ranks that must stop."""

from __future__ import annotations

import time

import pytest

from zero2all.elastic.agent import PEER_LOSS_TIMEOUT, Agent
from zero2all.elastic.heartbeat import HeartbeatStatus, StartupPhase
from zero2all.elastic.launcher import LaunchConfig


class PeerLoss:
    """A rendezvous that reports a lost peer since ``seconds``."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def seconds_since_peer_loss(self) -> float | None:
        return self.seconds


def agent(seconds: float | None, saving: bool, monkeypatch: pytest.MonkeyPatch) -> Agent:
    waiting_agent = Agent.__new__(Agent)
    waiting_agent.rendezvous, waiting_agent.grace = PeerLoss(seconds), 110.0  # type: ignore[assignment]
    phase_times = tuple(1.0 if saving and phase == StartupPhase.ENDING else 0.0 for phase in StartupPhase)
    monkeypatch.setattr(waiting_agent, "_heartbeat_statuses", lambda: {0: HeartbeatStatus(5, 0.0, phase_times)})
    monkeypatch.setattr(waiting_agent, "_running", lambda: {0: 1})
    return waiting_agent


@pytest.mark.parametrize(
    ("seconds", "saving", "waits"),
    [
        (None, False, 110.0),  # they may be saving, or about to
        (0.5, False, None),  # they may still notice it
        (PEER_LOSS_TIMEOUT + 1, False, 0.0),  # they block in a collective that never ends
        (
            PEER_LOSS_TIMEOUT + 1,
            True,
            109.0 - PEER_LOSS_TIMEOUT,
        ),  # they save, and have the time for it from the loss on
    ],
)
def test_ranks_whose_peer_is_lost_are_not_waited_for(
    seconds: float | None, saving: bool, waits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    waiting_agent = agent(seconds, saving, monkeypatch)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(duration: float) -> None:
        now[0] += duration
        if waiting_agent.rendezvous.seconds is not None:  # type: ignore[attr-defined]
            waiting_agent.rendezvous.seconds += duration  # type: ignore[attr-defined]

    monkeypatch.setattr(time, "sleep", sleep)
    waiting_agent._wait_for_ranks(110.0)
    assert now[0] == pytest.approx(PEER_LOSS_TIMEOUT - 0.5 if waits is None else waits, abs=0.2)


def test_ranks_have_nearly_the_two_minutes_that_slurm_gives() -> None:
    assert LaunchConfig(["train"], procs=1).grace == 110
