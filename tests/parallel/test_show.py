"""Layouts on paper."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from zero2all.errors import UsageError
from zero2all.parallel.show import show_layout
from zero2all.recipe import load_recipe, parse_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = """
model: {hidden_size: 64, intermediate_size: 128, n_layers: 4, n_heads: 8, n_kv_heads: 4, context: 64, vocab_size: 8192}
train: {steps: 1, seq_len: 64, batch_tokens: 1024}
"""


@pytest.mark.parametrize(
    ("override", "world"),
    [
        ("parallel={}", 1),
        ("parallel={}", 3),  # 3 does not divide the rows
        ("parallel={dp_replicate: 2, tp: 2}", 16),
        ("parallel={tp: 2, pp: 2, schedule: zbv, cp: 2}", 16),
    ],
)
def test_shards_add_up(override: str, world: int) -> None:
    shown = show_layout(parse_recipe(SMALL, [override]), world)
    assert sum(stage["parameters"] for stage in shown["stages"]) == shown["parameters"]
    mesh = shown["mesh"]
    held = sum(stage["most"] for stage in shown["stages"]) * (world // mesh["pp"])
    assert held >= shown["parameters"] * mesh["dp_replicate"]


def test_experts_add_up() -> None:
    moe = "model.moe={experts: 8, top_k: 2, expert_intermediate: 32, balance: bias}"
    shown = show_layout(parse_recipe(SMALL, [moe, "parallel={ep: 4, pp: 2}"]), 16)
    assert shown["mesh"]["ep"] == 4
    assert sum(stage["parameters"] for stage in shown["stages"]) == shown["parameters"]


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="there are 12"):
        show_layout(parse_recipe(SMALL, ["parallel={tp: 8}", "model.n_kv_heads=8"]), 12)


@pytest.mark.slow
def test_70b_on_1024_ranks_needs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shown = show_layout(load_recipe(RECIPES / "70b-1024.yaml"), 1024)
    assert shown["parameters"] == 70_553_706_496
    assert shown["mesh"] == {"pp": 4, "dp_replicate": 1, "dp_shard": 32, "cp": 1, "tp": 8, "ep": 1}
    # Norms are whole on the 8 tp ranks; all else is on one rank alone.
    held = sum(stage["most"] for stage in shown["stages"]) * 256
    assert shown["parameters"] < held < 1.001 * shown["parameters"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "in KiB: less than 1 GiB"
