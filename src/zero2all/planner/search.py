"""``z2a plan --search``: every layout of a recipe on some GPUs that fits, fastest first, and why the others fail."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zero2all.base.console import ProgressTask
from zero2all.base.errors import UsageError
from zero2all.base.findings import Finding
from zero2all.checkpoint.checkpoint_interval import DAY
from zero2all.model.cost.describe import with_precision_of
from zero2all.parallel.mesh import ParallelDims, split_batch
from zero2all.planner.cluster import Cluster
from zero2all.planner.pipeline import schedule_runs
from zero2all.planner.rank_plan import USABLE_MEMORY, fits_memory, plan_memory
from zero2all.planner.run_cost import TOKENS_PER_PARAMETER
from zero2all.planner.step_time import PlannedStepTime, plan_step
from zero2all.planner.workload import Layout, Workload, largest_stage, zero_stage
from zero2all.recipe import ParallelRecipe, Recipe, ResolvedStage
from zero2all.recipe.parallel import PipelineSchedule, parallel_mistakes

MICRO_BATCHES = (1, 2, 4, 8)  # samples of a forward pass
MIN_CONTEXT = 4096  # tokens of a sequence that cp leaves to a rank: fewer only add communication
SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved", "zero-bubble", "zbv")
"""gpipe has the bubble of 1f1b and holds more micro-batches: it is never better."""
RECOMPUTE: tuple[dict[str, object], ...] = tuple(
    {"activation_checkpointing": mode, "activation_checkpointing_every": every}
    for mode, every in (("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 4))
)
"""Keys of ``parallel``, fastest first: more recomputation is tried only where less does not fit."""
ZERO_KEYS: tuple[dict[str, object], ...] = tuple(
    {"zero": stage, "reshard_after_forward": "auto"} for stage in (1, 2, 3)
)
"""Keys of ``parallel`` for ZeRO 1, 2 and 3; the others are reset to their defaults."""
OFFLOADS: tuple[dict[str, object], ...] = ({"offload": "none"}, {"offload": "cpu"})
"""Keys of ``parallel`` for each kind of offload, the fastest first."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that fits."""

    overrides: list[str]
    """Overrides of the recipe, to train with it."""
    step: float
    """Expected seconds."""
    tokens_per_second: float
    mfu: float
    memory: int
    why: str
    """Where its time goes."""


@dataclass(frozen=True)
class SearchResult:
    best: list[LayoutCandidate]
    fitting: int
    tried: int
    rejected: dict[str, int]
    """How many layouts were tried and not taken, by reason."""
    tips: list[Finding]


def search_layouts(recipe: Recipe, cluster: Cluster, keep: int = 10, task: ProgressTask | None = None) -> SearchResult:
    """Batch size, sequence length and model stay as they are. Precision is float8 only if the recipe asks for it: it
    changes the result. ``task`` advances with each division of the GPUs."""
    recipe = with_precision_of(recipe, cluster.gpu)
    stage = largest_stage(recipe)
    workload = Workload.of(recipe, stage)
    found: list[tuple[Layout, PlannedStepTime]] = []
    rejected: Counter[str] = Counter()
    meshes = list(_meshes(recipe, cluster, rejected))
    if task is not None:
        task.describe("searching layouts", len(meshes))
    for parallel, dims in meshes:
        if task is not None:
            task(1)
        for layout in _layouts(parallel, dims, stage, rejected):
            fitting = _least_recomputation(recipe, workload, layout, cluster, rejected)
            if fitting is not None:
                found.append((fitting, plan_step(workload, fitting, cluster)))
    best = sorted(found, key=lambda one: one[1].expected)[:keep]
    return SearchResult(
        best=[_candidate(recipe, workload, cluster, *one) for one in best],
        fitting=len(found),
        tried=len(found) + sum(rejected.values()),
        rejected=dict(rejected.most_common()),
        tips=[*layout_tips(workload, cluster, *best[0]), *_float8_tip(workload, cluster, *best[0])] if best else [],
    )


def _layouts(
    parallel: ParallelRecipe, dims: ParallelDims, stage: ResolvedStage, rejected: Counter[str]
) -> Iterator[Layout]:
    """Every micro-batch and ZeRO stage of a mesh, without recomputation."""
    batch_samples = stage.batch_tokens // stage.seq_len
    rows = -(-batch_samples // dims.dp)
    zero_keys = [parallel.model_copy(update=keys) for keys in ZERO_KEYS]
    if dims.dp_shard * dims.cp == 1:
        zero_keys = zero_keys[-1:]  # nothing is sharded, whatever the stage
    elif dims.pp > 1:
        zero_keys = zero_keys[:-1]  # a pipeline keeps its weights: stage 3 is stage 2
    for samples in MICRO_BATCHES:
        if samples > 1 and rows % samples:
            rejected["the batch does not divide into such micro-batches"] += len(zero_keys)
            continue
        batch = split_batch(batch_samples, dims.dp, samples)
        if batch.micro_batches < dims.pp:
            rejected["fewer micro-batches than pipeline ranks: most of them would wait"] += len(zero_keys)
            continue
        if not schedule_runs(parallel.schedule, dims.pp, batch.micro_batches):
            rejected["the schedule cannot run that number of micro-batches"] += len(zero_keys)
            continue
        for one in zero_keys:
            yield Layout(dims, one, batch, stage.seq_len, parallel.stages_per_rank)


def _meshes(recipe: Recipe, cluster: Cluster, rejected: Counter[str]) -> Iterator[tuple[ParallelRecipe, ParallelDims]]:
    """Every valid division of the GPUs."""
    model, train, gpus = recipe.model, recipe.train, cluster.gpus
    seq_len = min(train.keys_by_seq_len())
    for tp, pp, cp in itertools.product(_divisors(gpus), repeat=3):
        if gpus % (tp * pp * cp) or pp > model.num_hidden_layers:
            continue
        if tp > cluster.gpus_per_node:
            rejected["tp over more than a node: its collectives cannot be hidden"] += 1
            continue
        if cp > 1 and seq_len // cp < MIN_CONTEXT:
            rejected[f"cp leaves a rank less than {MIN_CONTEXT:,} tokens of a sequence"] += 1
            continue
        dp = gpus // (tp * pp * cp)
        experts = _divisors(model.moe.num_experts) if model.moe is not None else [1]
        for dp_shard, ep, schedule in itertools.product(_divisors(dp), experts, SCHEDULES if pp > 1 else SCHEDULES[:1]):
            if (dp_shard * cp) % ep:
                continue
            update = {"dp_replicate": dp // dp_shard, "dp_shard": dp_shard, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
            parallel = recipe.parallel.model_copy(
                update={**update, "schedule": schedule, **RECOMPUTE[0], **OFFLOADS[0]}
            )
            mistake = next(parallel_mistakes(model, train, parallel), None)
            if mistake is not None:
                rejected[_short(mistake.message)] += 1
                continue
            yield parallel, ParallelDims(pp, dp // dp_shard, dp_shard, cp, tp, ep)


def _least_recomputation(
    recipe: Recipe, workload: Workload, layout: Layout, cluster: Cluster, rejected: Counter[str]
) -> Layout | None:
    """With the least recomputation and offload at which the layout fits: both only cost time."""
    for offload in OFFLOADS:
        tried = [replace(layout, parallel=layout.parallel.model_copy(update={**keys, **offload})) for keys in RECOMPUTE]
        if not _fits(recipe, workload, tried[-1], cluster):
            continue
        for one in tried:
            mistakes = itertools.chain(
                one.parallel.mistakes(), parallel_mistakes(recipe.model, recipe.train, one.parallel)
            )
            is_valid = next(mistakes, None) is None
            if is_valid and (one is tried[-1] or _fits(recipe, workload, one, cluster)):
                return one
    rejected["does not fit into memory, even with full recomputation and offload"] += 1
    return None


def _fits(recipe: Recipe, workload: Workload, layout: Layout, cluster: Cluster) -> bool:
    """Whether every training stage fits. ``workload`` and ``layout`` belong to the largest one."""
    limit = int(USABLE_MEMORY * cluster.gpu.memory)
    if not fits_memory(workload, layout, limit):
        return False
    return len(recipe.train.stages) < 2 or all(fits_memory(*one, limit) for one in _all_stages(recipe, layout))


def _all_stages(recipe: Recipe, layout: Layout) -> Iterator[tuple[Workload, Layout]]:
    """Each stage as it would be with the layout in the recipe."""
    tokens = layout.batch.samples * layout.seq_len
    changed = recipe.model_copy(
        update={"parallel": layout.parallel, "train": recipe.train.model_copy(update={"micro_batch_tokens": tokens})}
    )
    for stage in changed.train.resolved_stages():
        yield Workload.of(recipe, stage), Layout.of(changed, stage, layout.dims.world_size)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _short(message: str) -> str:
    """A mistake without its numbers' details, so that equal ones are counted together."""
    return message.partition(":")[0].partition(";")[0]


def _candidate(
    recipe: Recipe, workload: Workload, cluster: Cluster, layout: Layout, step: PlannedStepTime
) -> LayoutCandidate:
    rate = workload.batch_tokens / step.expected
    return LayoutCandidate(
        overrides=_overrides(layout, recipe.parallel),
        step=step.expected,
        tokens_per_second=rate,
        mfu=rate / cluster.gpus * workload.flops.model / cluster.gpu.flops,
        memory=max(plan_memory(*one).total for one in _all_stages(recipe, layout)),
        why=time_shares(step),
    )


def time_shares(step: PlannedStepTime) -> str:
    """Where the time of a step goes, in a line."""
    waiting = step.bubble * (step.compute + sum(one.seconds for one in step.traffic if not one.overlaps))
    again = sum(part.seconds for part in step.parts if part.name == "recomputation")
    shares = {"compute": step.compute - again, "recomputation": again, "bubble": waiting}
    for one in step.traffic:
        if not one.overlaps:
            shares[one.dimension] = shares.get(one.dimension, 0.0) + one.seconds
    shares["other communication"] = step.expected - sum(shares.values())
    return ", ".join(
        f"{name} {share / step.expected:.0%}" for name, share in shares.items() if share > 0.005 * step.expected
    )


def _overrides(layout: Layout, own: ParallelRecipe) -> list[str]:
    """Overrides for a recipe whose own layout is ``own``: what that sets and the layout does not is reset."""
    dims, parallel = layout.dims, layout.parallel
    given: dict[str, object] = {
        name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    }
    given = {name: size for name, size in given.items() if size != 1 or name == "dp_shard" or getattr(own, name) != 1}
    given |= {"schedule": parallel.schedule} if dims.pp > 1 else {}
    if layout.uses_fsdp:
        given["zero"] = parallel.zero
    reset = ("zero", "reshard_after_forward", "offload", "activation_checkpointing_every")
    given |= {name: getattr(parallel, name) for name in reset if getattr(parallel, name) != getattr(own, name)}
    given["activation_checkpointing"] = parallel.activation_checkpointing
    keys = [f"parallel.{name}={value}" for name, value in given.items()]
    return [*keys, f"train.micro_batch_tokens={layout.batch.samples * layout.seq_len}"]


def _float8_tip(workload: Workload, cluster: Cluster, layout: Layout, step: PlannedStepTime) -> list[Finding]:
    """What float8 would gain. It is not searched, because it changes what is learned."""
    if workload.float8 or cluster.gpu.fp8_flops is None or not workload.half:
        return []
    faster = plan_step(replace(workload, float8=True), layout, cluster).expected
    gain = f"it would make the first layout {step.expected / faster:.2f} times as fast; its results differ"
    return [Finding("note", "train.float8", gain)]


def layout_tips(workload: Workload, cluster: Cluster, layout: Layout, step: PlannedStepTime) -> list[Finding]:
    """Rules of thumb that apply to a layout, each with its reason."""
    dims, gpu = layout.dims, cluster.gpu
    links = (
        f"{gpu.link} has {gpu.link_bandwidth / 1e9:.0f} GB/s, the network {cluster.network_bandwidth / 1e9:.0f} GB/s"
    )
    gathered = max((one.seconds for one in step.traffic if one.dimension == "dp_shard"), default=0.0)
    days = TOKENS_PER_PARAMETER * workload.parts.total * workload.flops.model / (gpu.flops * 0.4) / DAY
    rules = {
        f"tp: stays inside a node, because its collectives cannot be hidden: {links} for each GPU": dims.tp > 1,
        "no tp: it makes every product smaller and waits for collectives; it pays if memory or batch require it": (
            dims.tp == 1 and dims.world_size > 1
        ),
        f"bubble: {step.bubble:.1%} of a step; more micro-batches or an interleaved schedule make it smaller": (
            dims.pp > 1
        ),
        "replicas: HSDP keeps the all-gathers of weights in smaller groups with faster links": dims.dp_replicate > 1,
        "ZeRO-1: it reduces gradients once per step; ZeRO-2 and 3 do so with every micro-batch": (
            layout.uses_fsdp and layout.accumulates and zero_stage(layout.parallel) == 1
        ),
        "no recomputation: memory is enough, and it would cost up to a third more FLOPs": (
            layout.parallel.activation_checkpointing == "none"
        ),
        "dp_shard: its collectives take longer than the computation; raise train.micro_batch_tokens": (
            gathered > step.compute
        ),
        f"GPUs: 20 tokens per parameter are {days:,.0f} GPU-days at 40% MFU: a thousand GPUs pay from 8,192 on": (
            days < 8192 <= 8 * cluster.gpus
        ),
    }
    parted = [text.partition(": ") for text, applies in rules.items() if applies]
    return [Finding("note", what, why) for what, _, why in parted]


def cheapest_changes(recipe: Recipe, cluster: Cluster, count: int = 3) -> list[str]:
    """Changes of a recipe that does not fit, those that cost the least time first."""
    stage = largest_stage(recipe)
    workload = Workload.of(recipe, stage)
    base = Layout.of(recipe, stage, cluster.gpus)
    samples = base.batch.samples
    updates: list[dict[str, object]] = [{"activation_checkpointing": mode} for mode in ("selective", "full")]
    updates += [dict(keys) for keys in ZERO_KEYS]
    updates += [dict(keys) for keys in OFFLOADS if keys]
    updates += [{"tp": tp, "dp_shard": "auto", "dp_replicate": 1} for tp in (2, 4, 8)]
    updates += [{"dp_shard": "auto", "dp_replicate": 1}]
    updates += [{"pp": pp, "dp_shard": "auto", "dp_replicate": 1} for pp in (2, 4, 8)]
    sizes = [samples, *(size for size in (samples // 2, samples // 4, 1) if 0 < size < samples)]
    found: dict[str, float] = {}
    for changes in [*({**one} for one in updates), {}, *({**a, **b} for a, b in itertools.combinations(updates, 2))]:
        for size in dict.fromkeys(sizes):
            tried = _try_change(recipe, workload, stage.batch_tokens // stage.seq_len, changes, size, cluster)
            if tried is not None and (changes or size != samples):
                changed = {name: value for name, value in changes.items() if getattr(recipe.parallel, name) != value}
                keys = [f"parallel.{name}={value}" for name, value in changed.items()]
                keys += [f"train.micro_batch_tokens={size * stage.seq_len}"] if size != samples else []
                found.setdefault(" ".join(keys), tried)
    ranked = sorted(found, key=lambda keys: (round(found[keys], 3), len(keys)))
    return [f"{keys} ({found[keys]:.2f} s per step)" for keys in ranked[:count]]


def _try_change(
    recipe: Recipe, workload: Workload, batch_samples: int, changes: dict[str, object], samples: int, cluster: Cluster
) -> float | None:
    """Expected seconds of a step if it fits."""
    parallel = recipe.parallel.model_copy(update=changes)
    if next(parallel_mistakes(recipe.model, recipe.train, parallel), None) or next(parallel.mistakes(), None):
        return None
    try:
        dims = ParallelDims.from_recipe(parallel, cluster.gpus)
    except UsageError:
        return None
    batch = split_batch(batch_samples, dims.dp, samples)
    layout = Layout(dims, parallel, batch, workload.seq_len, parallel.stages_per_rank)
    if batch.micro_batches < dims.pp or not schedule_runs(parallel.schedule, dims.pp, batch.micro_batches):
        return None
    return None if not _fits(recipe, workload, layout, cluster) else plan_step(workload, layout, cluster).expected
