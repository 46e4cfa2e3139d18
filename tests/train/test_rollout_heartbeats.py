"""Heartbeats while answers are sampled and rewarded, also of the ranks that only wait for it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.ranks import on_ranks
from zero2all.checkpoint import RankGroup, rank_group
from zero2all.generation import Completion
from zero2all.train.rollouts import Prompt, score_rollouts

SECONDS = 60.0


def reward_slowly(directory: Path) -> list[float]:
    """Rank 0 computes rewards until the other rank has sent heartbeats while it waits."""
    rank_group.CALL_INTERVAL = 0.05
    ranks, pings = RankGroup(), directory / "pings"
    answer = Completion("yes", [1], [0.0], "stop", [1])

    def slow(prompt: str, answer: str, reference: str) -> float:
        deadline = time.monotonic() + SECONDS
        while not pings.exists() or pings.stat().st_size < 3:
            assert time.monotonic() < deadline, "the other rank sent no heartbeat"
            time.sleep(0.01)
        return 0.5

    def ping() -> None:
        if ranks.rank == 1:
            with open(pings, "ab") as stream:
                stream.write(b".")

    (group,) = score_rollouts([Prompt([1], "?", "yes")], [[answer, answer]], [slow], ranks, ping)
    return [one.reward for one in group]


def test_a_rank_that_waits_for_slow_rewards_sends_heartbeats(tmp_path: Path) -> None:
    assert on_ranks(2, reward_slowly, tmp_path) == [[0.5, 0.5], [0.5, 0.5]]


def test_every_reward_is_a_heartbeat() -> None:
    pings: list[int] = []
    prompts = [Prompt([1], "?", "yes")] * 3
    answers = [[Completion("yes", [1], [0.0], "stop", [1])] * 4] * 3
    score_rollouts(prompts, answers, [lambda *_: 1.0], RankGroup(), lambda: pings.append(1))
    assert len(pings) == 12
