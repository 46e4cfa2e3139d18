"""Synchronization of 8 and 64 islands over 1 Gb/s, computed: what each method sends, and the tokens per second of all.

    python -m benchmarks islands_simulation --out bench

The step of every row is that of ``z2a plan`` (``planner.sync_plan``); nothing is measured. An island is a node, and the
batch grows with their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import benchmark_parser

from zero2all.base.charts.table import markdown_table
from zero2all.base.console import say
from zero2all.base.units import show_bytes
from zero2all.bench.measurements import write_report
from zero2all.planner.calibrated import find_entry
from zero2all.planner.cluster import Cluster
from zero2all.planner.sync_plan import SyncPlan, plan_sync
from zero2all.planner.workload import largest_stage
from zero2all.recipe import load_recipe_or_preset
from zero2all.train.hyperparameters import fill_hyperparameters, with_hyperparameters
from zero2all.train.micro_batch import estimate_micro_batch

ISLANDS, ISLAND_BATCH = (8, 64), 262144
ASSUMPTIONS = """\
Assumed: an island is a node of {per_node} x {gpu}; its {gigabits:g} Gb/s are shared by its GPUs, sending and
receiving, and 80% of them are reached; no packet is lost, and a round trip costs nothing; islands are equally fast;
{batch:,} tokens of an island in a step; DiLoCo sends int8 to every other island and waits for it (overlap=0).
"""


@dataclass(frozen=True)
class Simulation:
    islands: int
    plan: SyncPlan


def simulate(model: str, islands: int, gpu: str, per_node: int, gigabits: float) -> Simulation:
    overrides = [f"train.batch_tokens={islands * ISLAND_BATCH}", "train.steps=1000", "parallel.dp_shard=1"]
    recipe = fill_hyperparameters(load_recipe_or_preset(model, [*overrides, "parallel.dp_replicate=auto"]))
    cluster = Cluster.of(find_entry(gpu), islands * per_node, gigabits * 1e9 / 8 / per_node, per_node)
    recipe = with_hyperparameters(recipe, estimate_micro_batch(recipe, cluster.gpus, cluster.gpu.memory))
    plan = plan_sync(recipe, largest_stage(recipe), cluster)
    assert plan is not None
    return Simulation(islands, plan)


def markdown(simulations: list[Simulation], assumptions: str) -> str:
    head, rows = ["method"], []
    for one in simulations:
        head += [f"{one.islands} islands: s a step", "sent by a GPU", "tokens/s"]
    for methods in zip(*(one.plan.methods for one in simulations), strict=True):
        cells = [methods[0].name]
        for row in methods:
            cells += [f"{row.seconds:.3g}", show_bytes(row.bytes), f"{row.tokens_per_second:,.0f}"]
        rows.append(cells)
    return f"{assumptions}\n{markdown_table(head, rows)}\n"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the report")
    parser.add_argument("--model", default="z2all-1.1b", help="recipe or preset")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gigabits", type=float, default=1.0, help="of an island, in a second")
    options = parser.parse_args()
    per_node, gigabits = options.gpus_per_node, options.gigabits
    found = [simulate(options.model, islands, options.gpu, per_node, gigabits) for islands in ISLANDS]
    assumptions = ASSUMPTIONS.format(per_node=per_node, gpu=options.gpu, gigabits=gigabits, batch=ISLAND_BATCH)
    text = markdown(found, assumptions)
    say(text)
    write_report(options.out, "islands_simulation", found, text)
