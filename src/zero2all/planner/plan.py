"""``z2a plan``: everything that is known about a run on some GPUs before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.base.errors import UsageError
from zero2all.base.machine.gpu_specs import Gpu
from zero2all.model.cost.describe import with_precision_of
from zero2all.planner.cluster import Cluster
from zero2all.planner.pipeline import schedule_runs
from zero2all.planner.rank_plan import MemoryPlan, RankLayers, plan_layers, plan_recipe_memory
from zero2all.planner.run_cost import TOKENS_PER_PARAMETER, InferenceCost, Pauses, RunCost, inference_cost, run_cost
from zero2all.planner.step_time import FORWARD_AND_BACKWARD, PlannedStepTime, plan_step
from zero2all.planner.sync_plan import SyncPlan, plan_sync
from zero2all.planner.workload import Layout, Workload, largest_stage, zero_stage
from zero2all.recipe import Recipe


@dataclass(frozen=True)
class Speed:
    """At the expected step time. Utilisations are against the bf16 peak of the data sheet."""

    tokens_per_second: float
    """The rate of all GPUs together."""
    tflops: float
    """TFLOPS of a GPU, by zero2all's count: matrix products, every pair of attention."""
    mfu: float
    mfu_by_format: float
    """MFU against the peak of each product's own format: with float8 the projections have another peak."""
    hfu: float
    palm_tflops: float
    """TFLOPS by 6N + 12LHQT, with all parameters."""
    palm_mfu: float
    bloom_tflops: float
    """TFLOPS by BLOOM's formula: 6 or, with activation checkpointing, 8 for each parameter."""


@dataclass(frozen=True)
class ZeroPaper:
    """Bytes of weights, gradients and optimizer as https://arxiv.org/abs/1910.02054 counts them.

    fp16 weights and gradients take 2 bytes per parameter each, fp32 weights and the two moments of Adam 12.
    """

    weights: int
    gradients: int
    optimizer: int
    ranks: int
    stages: list[int]
    """On each of the ranks. Stage 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also weights."""

    @classmethod
    def of(cls, parameters: int, ranks: int) -> ZeroPaper:
        """``ranks`` are data-parallel.

        >>> [round(size / 1e9, 1) for size in ZeroPaper.of(7_500_000_000, ranks=64).stages]
        [120.0, 31.4, 16.6, 1.9]
        """
        optimizer, gradients, weights = in_order = (12 * parameters, 2 * parameters, 2 * parameters)
        stages = [sum(in_order[:zero]) // ranks + sum(in_order[zero:]) for zero in range(4)]
        return cls(weights, gradients, optimizer, ranks, stages)


@dataclass(frozen=True)
class ExchangeVolume:
    """Bytes that GPUs send in a step."""

    sent: float
    """Bytes that all GPUs send together."""
    replicas: int
    gradients: int
    """fp32 gradients of all replicas, what an all-reduce has to combine."""

    @classmethod
    def of(cls, workload: Workload, step: PlannedStepTime, gpus: int, replicas: int) -> ExchangeVolume:
        return cls(gpus * sum(one.bytes for one in step.traffic), replicas, 4 * replicas * workload.parts.total)


@dataclass(frozen=True)
class CostPlan:
    recipe: str
    cluster: Cluster
    parameters: int
    layout: dict[str, int | str]
    memory: MemoryPlan
    layers: list[RankLayers]
    zero_paper: ZeroPaper
    """For the part of the model that tensor and pipeline parallelism leave to a rank."""
    fits: bool
    flops_per_token: int
    palm_flops_per_token: int
    step: PlannedStepTime
    speed: Speed
    run: RunCost
    inference: InferenceCost
    traffic: ExchangeVolume
    sync: SyncPlan | None
    """Ways to synchronize its nodes; None on one node."""


def plan_run(
    recipe: Recipe,
    cluster: Cluster,
    tokens: int | None = None,
    price: float | None = None,
    pauses: Pauses | None = None,
) -> CostPlan:
    """Plan the stage that trains the most; memory is for the stage that takes the most."""
    recipe = with_precision_of(recipe, cluster.gpu)
    stage = largest_stage(recipe)
    workload, layout = Workload.of(recipe, stage), Layout.of(recipe, stage, cluster.gpus)
    if not schedule_runs(recipe.parallel.schedule, layout.dims.pp, layout.batch.micro_batches):
        raise UsageError(
            f"parallel.schedule={recipe.parallel.schedule} cannot run {layout.batch.micro_batches} micro-batches over "
            f"{layout.dims.pp} pipeline ranks: change train.micro_batch_tokens so that their number is a multiple"
        )
    memory = plan_recipe_memory(recipe, cluster.gpus)
    step, dims = plan_step(workload, layout, cluster), layout.dims
    return CostPlan(
        recipe=recipe.name,
        cluster=cluster,
        parameters=workload.parts.total,
        layout=describe_layout(layout, workload),
        memory=memory,
        layers=plan_layers(workload, layout),
        zero_paper=ZeroPaper.of(workload.parts.total // (dims.tp * dims.pp), dims.dp * dims.cp),
        fits=memory.total <= cluster.gpu.memory,
        flops_per_token=workload.flops.model,
        palm_flops_per_token=workload.palm_flops,
        step=step,
        speed=speed_of(workload, layout, cluster, step),
        run=run_cost(
            workload, cluster, step.expected, tokens or _planned_tokens(recipe, workload), price, pauses or Pauses()
        ),
        traffic=ExchangeVolume.of(workload, step, cluster.gpus, dims.dp),
        inference=inference_cost(workload, cluster),
        sync=plan_sync(recipe, stage, cluster),
    )


def _planned_tokens(recipe: Recipe, workload: Workload) -> int:
    """Tokens of all stages; for a length in epochs, 20 tokens for each parameter."""
    total = 0.0
    for stage in recipe.train.resolved_stages():
        if stage.duration.unit == "epochs":
            return TOKENS_PER_PARAMETER * workload.parts.total
        total += stage.duration.value * (stage.batch_tokens if stage.duration.unit == "steps" else 1)
    return round(total)


def speed_of(workload: Workload, layout: Layout, cluster: Cluster, step: PlannedStepTime) -> Speed:
    rate = workload.batch_tokens / step.expected  # padding is no work done
    each, peak = rate / cluster.gpus, cluster.gpu.flops
    palm = workload.palm_flops
    return Speed(
        tokens_per_second=rate,
        tflops=each * workload.flops.model / 1e12,
        mfu=each * workload.flops.model / peak,
        mfu_by_format=each * _seconds_at_peak(workload, cluster.gpu),
        hfu=each
        * workload.flops.hardware(layout.recompute, every=layout.parallel.activation_checkpointing_every)
        / peak,
        palm_tflops=each * palm / 1e12,
        palm_mfu=each * palm / peak,
        bloom_tflops=bloom_tflops(
            billions=workload.active_parameters / 1e9,
            seq_len=workload.seq_len,
            batch_samples=workload.batch_tokens // workload.seq_len,
            seconds=step.expected,
            gpus=cluster.gpus,
            recomputes=layout.recompute == "full",
        ),
    )


def bloom_tflops(
    billions: float, seq_len: int, batch_samples: int, seconds: float, gpus: int, *, recomputes: bool
) -> float:
    """TFLOP/s of a GPU: model size x 4 x 2 x tokens, with 3 in place of 4 without activation checkpointing.

    >>> round(bloom_tflops(52, 2048, 1024, seconds=127, gpus=64, recomputes=True), 1)
    107.3
    """
    return billions * (4 if recomputes else 3) * 2 * seq_len * batch_samples / (seconds * gpus * 1e3)


def _seconds_at_peak(workload: Workload, gpu: Gpu) -> float:
    """The time of one token on one GPU, if every product ran at the peak of its format."""
    flops, usual = workload.flops, gpu.peak_flops(workload.precision) or gpu.flops
    projections = (gpu.peak_flops("fp8") if workload.float8 else None) or usual
    matrices = FORWARD_AND_BACKWARD * (flops.projections + flops.mlp)
    return matrices / projections + (flops.model - matrices) / usual


def describe_layout(layout: Layout, workload: Workload) -> dict[str, int | str]:
    dims, parallel = layout.dims, layout.parallel
    shown: dict[str, int | str] = {
        name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    }
    shown |= {"schedule": parallel.schedule} if dims.pp > 1 else {}
    shown |= {"zero": zero_stage(parallel)} if layout.uses_fsdp else {}
    shown |= {"offload": str(parallel.offload)} if parallel.offload != "none" else {}
    return shown | {
        "activation_checkpointing": parallel.activation_checkpointing,
        "micro_batches": layout.batch.micro_batches,
        "micro_batch_samples": layout.batch.samples,
        "padding_samples": layout.batch.padding,
        "seq_len": workload.seq_len,
        "precision": "float8" if workload.float8 else workload.precision,
    }
