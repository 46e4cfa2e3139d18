"""Ways to synchronize nodes over their network: what is planned is what ranks send, and the advice follows from it."""

from __future__ import annotations

import pytest

from zero2all.planner.calibrated import find_entry
from zero2all.planner.cluster import Cluster
from zero2all.planner.sync_plan import FAST_ENOUGH, SyncPlan, island_exchange, plan_sync, sync_lines
from zero2all.planner.workload import largest_stage
from zero2all.recipe import Recipe, load_recipe_or_preset
from zero2all.train.hyperparameters import fill_hyperparameters

REPLICAS = ["parallel.dp_replicate=auto", "parallel.dp_shard=1"]


def recipe_for(*overrides: str) -> Recipe:
    batch = ["train.steps=10", "train.batch_tokens=65536", "train.micro_batch_tokens=8192"]
    return fill_hyperparameters(load_recipe_or_preset("z2all-85m", [*batch, *overrides]))


def plan(gigabits: float, *overrides: str, nodes: int = 2) -> SyncPlan | None:
    recipe = recipe_for(*overrides)
    cluster = Cluster.of(find_entry("h100"), 4 * nodes, gigabits * 1e9 / 8, 4)
    return plan_sync(recipe, largest_stage(recipe), cluster)


def planned(gigabits: float, *overrides: str) -> SyncPlan:
    found = plan(gigabits, *overrides)
    assert found is not None
    return found


def test_methods_send_what_their_names_say() -> None:
    rows = {row.name: row for row in planned(0.25, *REPLICAS).methods}
    assert list(rows) == ["all-reduce", "accumulation x8", "bf16", "diloco 10", "diloco 50"]
    plain = rows["all-reduce"]
    assert rows["accumulation x8"].bytes == plain.bytes
    assert rows["accumulation x8"].tokens_per_second > 4 * plain.tokens_per_second
    assert rows["bf16"].bytes == pytest.approx(plain.bytes / 2)
    assert rows["diloco 10"].bytes == pytest.approx(5 * rows["diloco 50"].bytes)
    assert rows["diloco 50"].seconds < rows["diloco 10"].seconds < plain.seconds


def test_a_slow_link_gets_advice_and_a_fast_one_does_not() -> None:
    slow, fast = planned(0.25, *REPLICAS), planned(400, *REPLICAS)
    assert "parallel.sync.islands=" in slow.recommendation
    assert slow.recommendation in "\n".join(sync_lines(slow))
    assert fast.recommendation == FAST_ENOUGH


def test_there_is_nothing_to_choose_on_one_node_or_where_tp_spans_nodes() -> None:
    assert plan(1, *REPLICAS, nodes=1) is None
    assert plan(1, "parallel.tp=4", "parallel.pp=2", "model.tie_word_embeddings=false") is None


def test_an_island_sends_its_part_to_every_other_one() -> None:
    assert island_exchange(parameters=800, itemsize=1, islands=5, ranks=4) == 200 * 4
