"""What a keeper does while training goes on: room, slow storage, and a record that lags behind."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.resilience.threads import OneWriter, run_threads
from zero2all.resilience import Keeper, Team
from zero2all.resilience.flash import staged_in


def a_model() -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
    model = nn.Linear(8, 8, bias=False)
    return model, [torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)]


# Ranks that moved


def test_slots_of_ranks_that_moved_away_are_removed(tmp_path: Path) -> None:
    """Nodes of two ranks each; after another rendezvous they hold each other's numbers."""

    def start(nodes: str) -> None:
        def rank(team: Team) -> None:
            model, optimizers = a_model()
            directory = tmp_path / nodes[team.rank] / "z2a-key-0"
            keeper = Keeper(OneWriter(tmp_path / "durable"), directory, tmp_path, model, optimizers, team)
            found = keeper.newest()
            if found is not None:
                keeper.load(found)
            else:
                keeper.begin(None)
            keeper.save(10 if found is None else found.step + 10, {"skipped": []}, durable=True)
            keeper.wait()

        run_threads(len(nodes), rank)

    for node in "AB":
        (tmp_path / node).mkdir()
    start("AABB")
    start("BBAA")
    held = {node: sorted(path.name for path in (tmp_path / node / "z2a-key-0").glob("rank-*")) for node in "AB"}
    assert held == {"A": ["rank-2-of-4", "rank-3-of-4"], "B": ["rank-0-of-4", "rank-1-of-4"]}
    start("BBAA")
    assert {slot.step for slot in staged_in(tmp_path / "A" / "z2a-key-0")} == {20, 30}, "their own stay"
