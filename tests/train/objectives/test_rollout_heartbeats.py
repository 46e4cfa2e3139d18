"""Heartbeats while answers are sampled and rewarded, also of the ranks that only wait for it."""

from __future__ import annotations

import pickle
import threading

import pytest

from zero2all.checkpoint import RankGroup, rank_group
from zero2all.generation import Completion
from zero2all.train.objectives.rollouts import Prompt, score_rollouts

ANSWER = Completion("yes", [1], [0.0], "stop", [1])
SECONDS = 30.0


def test_a_rank_that_waits_for_slow_rewards_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2: what the others compute arrives only after three heartbeats."""
    pings, enough = 0, threading.Event()

    def ping() -> None:
        nonlocal pings
        pings += 1
        if pings == 3:
            enough.set()

    class Tree:
        def gather(self, mine: bytes, merge: object) -> bytes:
            assert pickle.loads(mine) == (None, None), "rewards are computed on the first rank with these prompts"
            return mine

        def broadcast(self, mine: bytes) -> bytes:
            assert enough.wait(SECONDS), "a rank that waits sent no heartbeat"
            return pickle.dumps(([[0.5, 0.25]], None))

    monkeypatch.setattr(rank_group, "CALL_INTERVAL", 0.01)
    ranks = RankGroup()
    ranks._tree, ranks.rank, ranks.world_size = Tree(), 1, 2  # type: ignore[assignment]
    (found,) = score_rollouts([Prompt([1], "?", "yes")], [[ANSWER, ANSWER]], [], ranks, ping)
    assert [one.reward for one in found] == [0.5, 0.25]
    sent = pings
    assert not [thread for thread in threading.enumerate() if thread.name == "z2a-waiting"]
    assert pings == sent, "none after the wait"


def test_every_reward_is_a_heartbeat() -> None:
    pings: list[int] = []
    score_rollouts(
        [Prompt([1], "?", "yes")] * 3, [[ANSWER] * 4] * 3, [lambda *_: 1.0], RankGroup(), lambda: pings.append(1)
    )
    assert len(pings) == 12
