"""Ways to synchronize nodes over their network: what each sends and how long a step takes, before anything is bought.

Every row is the step of a changed recipe, planned as any other; only what islands exchange (DiLoCo) is added here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero2all.base.units import show_bytes
from zero2all.planner.cluster import LINK_EFFICIENCY, Cluster
from zero2all.planner.rank_plan import fits_memory
from zero2all.planner.step_time import plan_step
from zero2all.planner.workload import Layout, Workload
from zero2all.recipe import ParallelRecipe, Recipe, ResolvedStage

ACCUMULATION = 8
INTERVALS = (10, 50)
FAST_ENOUGH = "the network is fast enough: all-reduce"
WORTH_IT = 1.1  # times faster, below which the simpler way is recommended
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class SyncMethod:
    """One way to synchronize, over the network between nodes."""

    name: str
    overrides: tuple[str, ...]
    """What to set in the recipe."""
    bytes: float
    """Bytes that a GPU sends to other nodes in a step, on average."""
    seconds: float
    """The time of a step, on average."""
    tokens_per_second: float
    """The rate of all GPUs together."""
    fits: bool
    """Into the memory of a GPU."""
    changes: str
    """What it changes in training; empty: nothing."""


@dataclass(frozen=True)
class SyncPlan:
    bandwidth: float
    """Bytes per second that a GPU sends to other nodes."""
    methods: list[SyncMethod]
    recommendation: str


def plan_sync(recipe: Recipe, stage: ResolvedStage, cluster: Cluster) -> SyncPlan | None:
    """None where there is nothing to choose: one node, or dimensions over it that are not data parallel."""
    parallel, nodes = recipe.parallel, cluster.nodes
    dims = Layout.of(recipe, stage, cluster.gpus).dims
    if nodes == 1 or dims.tp * dims.cp * dims.pp > cluster.gpus_per_node or parallel.offload != "none":
        return None
    plain = parallel.model_copy(update={"sync": type(parallel.sync)(), "gradient_dtype": "fp32"})
    method = _Planner(recipe, stage, cluster)
    rows = [method.of("all-reduce", plain, (), "")]
    rows.append(
        method.of(
            f"accumulation x{ACCUMULATION}",
            plain,
            (f"train.batch_tokens={ACCUMULATION * stage.batch_tokens}",),
            f"a batch {ACCUMULATION} times larger",
            batch=ACCUMULATION,
        )
    )
    half = plain.model_copy(update={"gradient_dtype": "bf16"})
    rows.append(method.of("bf16", half, ("parallel.gradient_dtype=bf16",), "sums are rounded"))
    rows += [method.islands(every) for every in INTERVALS]
    return SyncPlan(cluster.network_bandwidth, rows, _recommend(rows))


@dataclass(frozen=True)
class _Planner:
    recipe: Recipe
    stage: ResolvedStage
    cluster: Cluster

    def of(
        self, name: str, parallel: ParallelRecipe, overrides: tuple[str, ...], changes: str, batch: int = 1
    ) -> SyncMethod:
        """A step with all GPUs in one job."""
        stage = replace(self.stage, given_batch_tokens=batch * self.stage.batch_tokens)
        recipe = self.recipe.model_copy(update={"parallel": parallel})
        layout = Layout.of(recipe, stage, self.cluster.gpus)
        workload = Workload.of(recipe, stage)
        step = plan_step(workload, layout, self.cluster)
        return SyncMethod(
            name,
            overrides,
            bytes=sum(one.bytes for one in step.traffic if one.link == "network"),
            seconds=step.expected,
            tokens_per_second=stage.batch_tokens / step.expected,
            fits=fits_memory(workload, layout, self.cluster.gpu.memory),
            changes=changes,
        )

    def islands(self, every: int) -> SyncMethod:
        """Each node a job of its own, with its part of the batch."""
        nodes, per_node = self.cluster.nodes, self.cluster.gpus_per_node
        sync = self.recipe.parallel.sync.model_copy(update={"islands": nodes, "every": every})
        own = {"dp_replicate": 1, "dp_shard": "auto", "gradient_dtype": "fp32", "sync": sync}
        recipe = self.recipe.model_copy(update={"parallel": self.recipe.parallel.model_copy(update=own)})
        workload, layout = Workload.of(recipe, self.stage), Layout.of(recipe, self.stage, per_node)
        step = plan_step(workload, layout, replace(self.cluster, gpus=per_node))
        exchange = island_exchange(workload.parts.total, BYTES[sync.exchange_dtype], nodes, per_node)
        seconds = step.expected + exchange / (self.cluster.network_bandwidth * LINK_EFFICIENCY) / every
        overrides = (f"parallel.sync.islands={nodes}", f"parallel.sync.every={every}")
        return SyncMethod(
            f"diloco {every}",
            overrides,
            bytes=exchange / every,
            seconds=seconds,
            tokens_per_second=self.stage.batch_tokens / seconds,
            fits=fits_memory(workload, layout, self.cluster.gpu.memory),
            changes=f"nodes train {every} steps on their own",
        )


def island_exchange(parameters: float, itemsize: float, islands: int, ranks: int) -> float:
    """Bytes that a rank of an island sends in one exchange: what its shard has gained, to every other island."""
    return itemsize * parameters / ranks * (islands - 1)


def _recommend(rows: list[SyncMethod]) -> str:
    """The first that is as good as the fastest, but for a little; they stand in the order of what they change."""
    fitting = [row for row in rows if row.fits] or rows
    fastest = max(row.tokens_per_second for row in fitting)
    chosen = next(row for row in fitting if row.tokens_per_second * WORTH_IT >= fastest)
    if not chosen.overrides:
        return FAST_ENOUGH
    gain = chosen.tokens_per_second / rows[0].tokens_per_second
    return f"{chosen.name}: {gain:.1f} times the tokens per second of all-reduce, with {' '.join(chosen.overrides)}"


def sync_lines(plan: SyncPlan) -> list[str]:
    lines = [f"synchronization over this link ({8 * plan.bandwidth / 1e9:.3g} Gb/s a GPU):"]
    for row in plan.methods:
        numbers = f"{show_bytes(row.bytes):>9} per step  {row.seconds:>8.3g}s  {row.tokens_per_second:>10,.0f} tok/s"
        text = f"  {row.name:<18}{numbers}  {row.changes}"
        lines.append(text.rstrip() if row.fits else f"{text}; does not fit into memory")
    return [*lines, f"  try {plan.recommendation}"]
