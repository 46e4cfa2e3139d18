"""How long a step takes: the roofline of each part of the model, the collectives of each dimension, and the bubble.

Computation and communication overlap in part, so a time is a range: from the longer of the two to their sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pydantic import computed_field

from zero2all.model.cost.model_size import weight_dtype
from zero2all.parallel.gradient_sync import Collective, gradient_itemsize, reduce_itemsizes
from zero2all.planner.cluster import PCIE_BANDWIDTH, Cluster, CommunicationGroup
from zero2all.planner.pipeline import bubble_fraction
from zero2all.planner.post_training import sampling_seconds
from zero2all.planner.workload import Layout, Workload

MEMORY_EFFICIENCY = 0.8  # of the nominal memory bandwidth: what element-wise kernels reach
FORWARD_AND_BACKWARD = 3  # a product has two in the backward
NORM_FLOPS, ROPE_FLOPS, SWIGLU_FLOPS = 4, 3, 5  # for each element, in a pass
HIDDEN_COST = 0.15  # of a hidden collective: NCCL's kernels take about this share of the multiprocessors while they run


@dataclass(frozen=True)
class ComputePart:
    """One part of the computation of a rank in a step."""

    name: str
    flops: float
    bytes: float
    """Moved between the GPU and its memory."""
    seconds: float
    bound: str
    """``compute`` or ``memory``, whichever takes longer."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Traffic:
    """The collectives of one dimension of the mesh in a step."""

    dimension: str
    what: str
    link: str
    ranks: int
    bytes: float
    """Bytes that a rank sends."""
    seconds: float
    overlaps: bool
    """Whether it runs while something else is computed."""


@dataclass(frozen=True)
class PlannedStepTime:
    """Seconds of a step."""

    parts: list[ComputePart]
    traffic: list[Traffic]
    compute: float
    communication: float
    bubble: float
    """Idle time of the pipeline, as a share of the busy time."""
    shortest: float
    """If all communication were hidden behind computation, or the reverse."""
    expected: float
    """With the overlap that the layout allows."""
    longest: float
    """If nothing overlapped."""
    sampling: float = 0.0
    """The share of these that samples answers before the forward pass."""


def plan_step(workload: Workload, layout: Layout, cluster: Cluster) -> PlannedStepTime:
    parts = compute_parts(workload, layout, cluster)
    traffic = step_traffic(workload, layout, cluster)
    compute, communication = sum(part.seconds for part in parts), sum(one.seconds for one in traffic)
    hidden = sum(one.seconds for one in traffic if one.overlaps)
    bubble = bubble_fraction(
        layout.parallel.schedule, layout.dims.pp, layout.batch.micro_batches, layout.stages_per_rank
    )
    # The collectives of the first and the last layer have nothing to hide behind.
    ends = hidden / (workload.config.num_hidden_layers + 1)
    sampling = sampling_seconds(workload, layout, cluster)
    shortest = max(compute, communication) * (1 + bubble)
    busy, longest = compute + communication - hidden, (compute + communication) * (1 + bubble)
    expected = max(shortest, min(busy * (1 + bubble) + max(ends, HIDDEN_COST * hidden, hidden - compute), longest))
    return PlannedStepTime(
        parts=parts,
        traffic=traffic,
        compute=compute,
        communication=communication,
        bubble=bubble,
        shortest=shortest + sampling,
        expected=expected + sampling,
        longest=longest + sampling,
        sampling=sampling,
    )


def compute_parts(workload: Workload, layout: Layout, cluster: Cluster) -> list[ComputePart]:
    """Parts of the pipeline rank with the most to compute."""
    dims, flops, config = layout.dims, workload.flops, workload.config
    share = pipeline_share(workload, layout)
    tokens, element = layout.step_tokens * share, workload.itemsize
    products = "fp8" if workload.float8 else workload.precision
    hidden, heads, keys, wide = (size / dims.tp for size in _widths(workload))
    gathered = hidden * dims.tp  # the stream, which every rank of tp reads and writes whole
    # Every pass of a micro-batch reads the weights; what goes in and out of a product is counted for each product.
    blocks = workload.parts.all_blocks.elements.on_rank(dims.tp, dims.ep)
    mlp_share = flops.mlp / (flops.mlp + flops.projections)
    reads = FORWARD_AND_BACKWARD * layout.batch.micro_batches * element * blocks * share
    passes = FORWARD_AND_BACKWARD * element * config.num_hidden_layers * tokens
    repeated = flops.hardware(layout.recompute, every=layout.parallel.activation_checkpointing_every) - flops.hardware(
        "none"
    )
    stream = 4 if config.residual_fp32 else element
    again = config.num_hidden_layers * tokens * (FORWARD_AND_BACKWARD + (layout.recompute != "none"))
    rows = [
        (
            "attention projections",
            products,
            FORWARD_AND_BACKWARD * flops.projections,
            reads * (1 - mlp_share) + passes * (4 * gathered + 2 * heads + 2 * keys),
        ),
        # Fused attention skips masked tiles, and computes the scores once more in the backward.
        ("attention scores", workload.precision, 3.5 * flops.causal_scores, passes * (2 * heads + 2 * keys)),
        (
            "feed-forward",
            products,
            FORWARD_AND_BACKWARD * flops.mlp,
            reads * mlp_share + passes * (3 * gathered + 3 * wide),
        ),
        (
            "recomputation",
            products,
            repeated,
            passes / FORWARD_AND_BACKWARD * (6 * gathered + 3 * heads + 2 * wide) if repeated else 0.0,
        ),
        (
            "head and loss",
            workload.precision,
            FORWARD_AND_BACKWARD * flops.head,
            tokens * FORWARD_AND_BACKWARD * element * config.padded_vocab_size / dims.tp,
        ),
    ]
    parts = [_part(name, precision, count * tokens / dims.tp, moved, cluster) for name, precision, count, moved in rows]
    width = hidden if layout.parallel.sp else gathered
    vectors = [
        # A block has two norms and two residual connections. Their sums over the width make norms the denser ones.
        _vector_part("norms", again * 2 * NORM_FLOPS * width, again * 2 * (stream + 2) * width, cluster),
        _vector_part(
            "element-wise: residual, RoPE, SwiGLU",
            again * (2 * width + ROPE_FLOPS * (heads + keys) + SWIGLU_FLOPS * wide),
            again * (2 * (2 * stream + 2) * width + 4 * (heads + keys) + 6 * wide),
            cluster,
        ),
    ]
    return [*(part for part in [*parts, *vectors] if part.seconds), _update(workload, layout, cluster)]


def pipeline_share(workload: Workload, layout: Layout) -> float:
    """The share of all layers that the pipeline rank with the most to compute has."""
    is_v = layout.parallel.schedule == "zbv"
    return _busiest_rank(workload, layout.dims.pp, layout.stages_per_rank, is_v=is_v)


@functools.lru_cache(maxsize=256)
def _busiest_rank(workload: Workload, pp: int, stages_per_rank: int, *, is_v: bool) -> float:
    if pp == 1:
        return 1.0
    costs = workload.layer_costs
    stages = [sum(costs[layer] for layer in stage) for stage in workload.stages(pp * stages_per_rank)]
    if is_v:  # there and back
        stages = stages[:pp] + stages[pp:][::-1]
    return max(sum(stages[rank::pp]) for rank in range(pp)) / sum(costs)


def _widths(workload: Workload) -> tuple[int, int, int, int]:
    """Widths of the residual stream, the queries, the keys, and the feed-forward layers that a token goes through."""
    config, moe = workload.config, workload.config.moe
    heads, keys = (count * config.head_size for count in (config.num_attention_heads, config.num_key_value_heads))
    experts = (moe.num_experts_per_tok + moe.n_shared_experts) * moe.moe_intermediate_size if moe else 0
    return config.hidden_size, heads, keys, experts or config.intermediate_size


def _part(name: str, precision: str, flops: float, moved: float, cluster: Cluster) -> ComputePart:
    """The time is the sum, not the roofline's maximum: a kernel loads its first tiles before it computes, and writes
    its output after. That is why small matrices, such as tp's, are less efficient."""
    gpu = cluster.gpu
    peak = gpu.peak_flops(precision) or gpu.flops
    computing, moving = flops / (peak * gpu.efficiency), moved / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
    return ComputePart(name, flops, moved, computing + moving, "compute" if computing >= moving else "memory")


def _vector_part(name: str, flops: float, moved: float, cluster: Cluster) -> ComputePart:
    """The part of an operation without a matrix product, whose FLOPs take no time beside its memory traffic."""
    return ComputePart(name, flops, moved, moved / (cluster.gpu.memory_bandwidth * MEMORY_EFFICIENCY), "memory")


def _update(workload: Workload, layout: Layout, cluster: Cluster) -> ComputePart:
    """The optimizer reads and writes weights and state of this rank's shard, and reads its gradients."""
    dims, everything, ranks = layout.dims, workload.parts.all, layout.shards * layout.dims.pp
    weights = everything.trained.on_rank(dims.tp, ep=1) / ranks
    state = everything.state.on_rank(dims.tp, ep=1) / ranks
    itemsize = weight_dtype(workload.optimizer).itemsize
    moved = 3 * itemsize * weights + 2 * state
    if layout.parallel.offload != "none":  # gradients to the host, weights back
        return ComputePart(
            "optimizer update on the host", 0.0, moved, 2 * itemsize * weights / PCIE_BANDWIDTH, "memory"
        )
    return _part("optimizer update", "", 0.0, moved, cluster)


def step_traffic(workload: Workload, layout: Layout, cluster: Cluster) -> list[Traffic]:
    """What the ranks of each dimension send each other in a step. Ranks of tp are neighbours, ranks of pp far apart."""
    rows = [
        *_data_parallel(workload, layout, cluster),
        *_tensor_parallel(workload, layout, cluster),
        *_context_parallel(workload, layout, cluster),
        *_expert_parallel(workload, layout, cluster),
        *_pipeline(workload, layout, cluster),
    ]
    return [row for row in rows if row.bytes]


def _traffic(
    dimension: str,
    what: str,
    group: CommunicationGroup,
    calls: float,
    collective: Collective,
    size: float,
    *,
    overlaps: bool,
) -> Traffic:
    """``calls`` collectives of ``size`` bytes each."""
    sent, seconds = group.sent_bytes(collective, size), group.seconds(collective, size)
    return Traffic(dimension, what, group.link, group.size, calls * sent, calls * seconds, overlaps)


def _data_parallel(workload: Workload, layout: Layout, cluster: Cluster) -> list[Traffic]:
    dims, parts = layout.dims, workload.parts
    elements, trained = (split.on_rank(dims.tp, dims.ep) / dims.pp for split in (parts.all.elements, parts.all.trained))
    units = len(parts.blocks) / dims.pp  # collectives run block by block
    shards = cluster.group(layout.shards, dims.tp)
    replicas = cluster.group(dims.dp_replicate, dims.tp * layout.shards)
    weights, gradient = workload.itemsize * elements / units, trained / units
    gathers = units * (2 * layout.batch.micro_batches if layout.frees_weights else 1)
    sizes = reduce_itemsizes(layout.parallel, layout.batch.micro_batches, dims.dp_replicate)
    scattered = gradient * sum(sizes) / len(sizes)
    reduced = gradient_itemsize(layout.parallel) * (gradient / layout.shards)  # while the backward pass computes
    calls = units * len(sizes)
    return [
        _traffic("dp_shard", "all-gather of weights", shards, gathers, "all-gather", weights, overlaps=True),
        _traffic("dp_shard", "reduce-scatter of gradients", shards, calls, "reduce-scatter", scattered, overlaps=True),
        _traffic("dp_replicate", "all-reduce of gradients", replicas, units, "all-reduce", reduced, overlaps=True),
    ]


def _passes(layout: Layout) -> float:
    """Forward and backward passes over a layer in a step; recomputation runs forward once more."""
    return layout.batch.micro_batches * (3 if layout.recompute == "full" else 2)


def _stream_bytes(workload: Workload, layout: Layout) -> float:
    return float(layout.micro_tokens * workload.config.hidden_size * workload.itemsize)


def _layers(workload: Workload, layout: Layout) -> float:
    return workload.config.num_hidden_layers * pipeline_share(workload, layout)


def _tensor_parallel(workload: Workload, layout: Layout, cluster: Cluster) -> list[Traffic]:
    """Two all-gathers and two reduce-scatters in a pass over a block (with sp), or two all-reduces of the same cost."""
    group = cluster.group(layout.dims.tp, 1)
    calls = 4 * _passes(layout) * _layers(workload, layout)
    what = "all-gather and reduce-scatter of activations" if layout.parallel.sp else "all-reduce of activations"
    size = _stream_bytes(workload, layout)
    return [_traffic("tp", what, group, calls, "all-gather", size, overlaps=layout.parallel.async_tp)]


def _context_parallel(workload: Workload, layout: Layout, cluster: Cluster) -> list[Traffic]:
    config, dims = workload.config, layout.dims
    group = cluster.group(dims.cp, dims.tp)
    heads, keys = (
        count * config.head_size / dims.tp for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    token = layout.micro_tokens * workload.itemsize
    calls = _passes(layout) * _layers(workload, layout)
    if layout.parallel.cp_attention == "ulysses":
        return [
            _traffic(
                "cp", "all-to-all of heads", group, calls, "all-to-all", token * (2 * heads + 2 * keys), overlaps=False
            )
        ]
    ring = layout.parallel.cp_attention == "ring"
    size = 2 * keys * token * dims.cp
    return [_traffic("cp", "keys and values", group, calls, "all-gather", size, overlaps=ring)]


def _expert_parallel(workload: Workload, layout: Layout, cluster: Cluster) -> list[Traffic]:
    moe = workload.config.moe
    if moe is None:
        return []
    group = cluster.group(layout.dims.ep, layout.dims.tp)
    calls = 2 * _passes(layout) * _layers(workload, layout)
    size = _stream_bytes(workload, layout) * moe.num_experts_per_tok
    return [_traffic("ep", "all-to-all of tokens", group, calls, "all-to-all", size, overlaps=False)]


def _pipeline(workload: Workload, layout: Layout, cluster: Cluster) -> list[Traffic]:
    dims = layout.dims
    group = cluster.group(dims.pp, dims.world_size // dims.pp)
    stream = 4 if workload.config.residual_fp32 else workload.itemsize
    size = layout.micro_tokens * workload.config.hidden_size * stream / (dims.tp if layout.parallel.sp else 1)
    calls = 2 * layout.batch.micro_batches * layout.stages_per_rank
    return [
        _traffic(
            "pp", "residual stream between stages", group, calls, "send", size if dims.pp > 1 else 0.0, overlaps=True
        )
    ]
