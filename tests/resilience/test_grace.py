"""How long ranks that are told to stop are waited for."""

from __future__ import annotations

import time

import pytest

from zero2all.resilience.agent import PEER_LOST, Agent
from zero2all.resilience.beat import Mark, Pulse
from zero2all.resilience.launch import Job


class Lost:
    """A rendezvous that knows of a lost peer for so many seconds."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def lost_for(self) -> float | None:
        return self.seconds


def agent(seconds: float | None, saving: bool, monkeypatch: pytest.MonkeyPatch) -> Agent:
    found = Agent.__new__(Agent)
    found.rendezvous, found.grace = Lost(seconds), 110.0  # type: ignore[assignment]
    marks = tuple(1.0 if saving and mark == Mark.ENDING else 0.0 for mark in Mark)
    monkeypatch.setattr(found, "_pulses", lambda: {0: Pulse(5, 0.0, marks)})
    monkeypatch.setattr(found, "_running", lambda: {0: 1})
    return found


@pytest.mark.parametrize(
    ("seconds", "saving", "waits"),
    [
        (None, False, 110.0),  # they may be saving, or about to
        (0.5, False, None),  # they may notice by themselves
        (PEER_LOST + 1, False, 0.0),  # they sleep in a collective that never ends
        (PEER_LOST + 1, True, 109.0 - PEER_LOST),  # they save, and have the time for it from the loss on
    ],
)
def test_ranks_whose_peer_is_lost_are_not_waited_for(
    seconds: float | None, saving: bool, waits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    found = agent(seconds, saving, monkeypatch)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(duration: float) -> None:
        now[0] += duration
        if found.rendezvous.seconds is not None:  # type: ignore[attr-defined]
            found.rendezvous.seconds += duration  # type: ignore[attr-defined]

    monkeypatch.setattr(time, "sleep", sleep)
    found._wait_for_ranks(110.0)
    assert now[0] == pytest.approx(PEER_LOST - 0.5 if waits is None else waits, abs=0.2)


def test_ranks_have_nearly_the_two_minutes_that_slurm_gives() -> None:
    assert Job(["train"], procs=1).grace == 110
