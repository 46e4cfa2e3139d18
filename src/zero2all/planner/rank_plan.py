"""Bytes that a rank holds, from formulas alone: fast enough for a search over thousands of layouts.

Tests compare them with the sharded model and with memory that was measured.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import computed_field

from zero2all.base.units import show_bytes, show_count
from zero2all.model.cost.activations import (
    ActivationPolicy,
    ActivationShards,
    activation_bytes,
    dropout_score_bytes,
    loss_bytes,
)
from zero2all.model.cost.model_size import weight_dtype
from zero2all.parallel.fsdp import reshard_after_forward
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight, stage_indices_of_rank
from zero2all.planner.post_training import plan_rollouts, plan_teacher
from zero2all.planner.workload import GPU, Layout, Unit, Workload
from zero2all.recipe import Recipe

CUDA_CONTEXT = round(0.92e9)  # torch 2.1 on A100 with all kernels loaded (CUDA_MODULE_LOADING=EAGER)
LAZY_CONTEXT = round(0.47e9)  # the same with one kernel: CUDA_MODULE_LOADING=LAZY, the default, loads those that run
LAZY_NOTE = f"all kernels loaded; {show_bytes(LAZY_CONTEXT)} before the first, with lazy loading"
HOST_MEMORY = 256e9  # of a node, for each of its GPUs: 2 TB beside 8, as in DGX A100 and H100
COMMUNICATORS = round(1.5e9)  # of torch.distributed over NCCL, measured after its first collective
GROUP = round(0.1e9)  # of each further dimension of the mesh
FRAGMENTATION = 0.05  # of what the allocator holds; less with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
USABLE_MEMORY = 0.95  # of a GPU, for a layout or a micro-batch that is chosen: the rest is for what no formula knows
CONTEXT, GROUPS, MARGIN = "CUDA context", "communicators", "fragmentation margin"
STORED, ACTIVATIONS, LOGITS, APART = "weights (stored)", "activations", "logits", "not at the same time"
FP32_BYTES = 4
_MANY = 2**20  # tokens for which coefficients are computed, so that rounding does not matter


@dataclass(frozen=True)
class MemoryPart:
    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the rank that holds the most, at the worst moment of a step."""

    pp_rank: int
    parts: list[MemoryPart]
    """The parts that are not 0."""
    host: int
    """In the memory of the host, for this rank."""
    files: int = 0
    """In files of ``parallel.offload``, for this rank."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def peak(self) -> int:
        """The peak of tensors alone."""
        return sum(part.bytes for part in self.parts if part.name not in (CONTEXT, GROUPS, MARGIN))

    def bytes_of(self, *names: str) -> int:
        """The sum of the parts whose name starts with one of these."""
        return sum(part.bytes for part in self.parts if part.name.startswith(names))


def plan_memory(workload: Workload, layout: Layout, device: torch.device = GPU) -> MemoryPlan:
    """Plan the pipeline rank that holds the most."""
    plans = (plan_rank_memory(workload, layout, rank, device) for rank in fullest_ranks(workload, layout))
    return max(plans, key=lambda plan: plan.total)


@dataclass(frozen=True)
class RankLayers:
    """What each rank of a pipeline rank holds."""

    pp_rank: int
    layers: list[int]
    parameters: int
    """Parameters of its pipeline stages, before tensor parallelism and FSDP shard them."""
    on_rank: int
    """The parameters that one rank has of these."""
    memory: int


def plan_layers(workload: Workload, layout: Layout) -> list[RankLayers]:
    """All pipeline ranks."""
    found = []
    for rank in range(layout.dims.pp):
        stages, dims = layout.stages_of(workload, rank), layout.dims
        elements = workload.parts.of_stages(stages).elements
        found.append(
            RankLayers(
                pp_rank=rank,
                layers=[layer for stage in stages for layer in stage],
                parameters=round(elements.total),
                # Ranks of ep are ranks of dp_shard and cp too: all of these together hold one copy of the experts.
                on_rank=round(elements.on_rank(dims.tp, ep=1) / layout.shards),
                memory=plan_rank_memory(workload, layout, rank).total,
            )
        )
    return found


def plan_recipe_memory(recipe: Recipe, gpus: int, device: torch.device = GPU) -> MemoryPlan:
    """Plan the training stage and the pipeline rank that take the most."""
    plans = (
        plan_memory(Workload.of(recipe, stage, device), Layout.of(recipe, stage, gpus), device)
        for stage in recipe.train.resolved_stages()
    )
    return max(plans, key=lambda plan: plan.total)


def fits_memory(workload: Workload, layout: Layout, limit: int) -> bool:
    """Whether every rank fits, without the ranks after the first that does not."""
    return all(plan_rank_memory(workload, layout, rank).total <= limit for rank in fullest_ranks(workload, layout))


def fullest_ranks(workload: Workload, layout: Layout) -> list[int]:
    """Pipeline ranks that may hold the most: the first of those with the same layers, and the last, with the head.

    No rank has more micro-batches in flight than the ranks before it.
    """
    pp = layout.dims.pp
    if pp == 1:
        return [0]
    return _first_of_a_kind(workload, tuple(tuple(stage_indices_of_rank(layout.parallel, rank)) for rank in range(pp)))


@functools.lru_cache(maxsize=512)
def _first_of_a_kind(workload: Workload, stage_indices: tuple[tuple[int, ...], ...]) -> list[int]:
    stages = workload.stages(sum(map(len, stage_indices)))
    kinds = [
        Counter(workload.config.is_moe_layer(layer) for index in own for layer in stages[index])
        for own in stage_indices
    ]
    return sorted({*(kinds.index(kind) for kind in kinds), len(kinds) - 1})


def plan_rank_memory(workload: Workload, layout: Layout, pp_rank: int, device: torch.device = GPU) -> MemoryPlan:
    dims, stages = layout.dims, layout.stages_of(workload, pp_rank)
    frees = reshard_after_forward(layout.parallel) if layout.uses_fsdp else None
    states = _state_bytes(workload, stages, dims.tp, dims.ep, frees)
    layers = tuple(layer for stage in stages for layer in stage)
    held, keeps = round(states.weights / layout.shards), layout.accumulates and not layout.reduces_every_micro_batch
    between = states.between_micro_batches if keeps and layout.uses_fsdp else 0
    offloads = layout.parallel.offload != "none" and device.type != "cpu"  # whose memory is the host's
    on_host = [
        MemoryPart(STORED, held, "of this rank's shard"),
        MemoryPart("gradients", round(states.gradients / layout.shards), "of this shard"),
    ]
    state = MemoryPart(f"optimizer state ({workload.optimizer.name})", round(states.optimizer / layout.shards))
    in_files = layout.parallel.offload_dir is not None
    on_host += [] if in_files else [state]
    logits = _logits(workload, layout, device) if layers[-1] == workload.last_layer else 0
    scores = dropout_score_bytes(workload.config, layout.seq_len, device)
    after_loss = states.gradient_buffers + _recomputed_bytes(workload, layout, layers, scores)
    parts = [
        *([] if offloads else on_host),
        MemoryPart(f"weights in {workload.precision}", states.compute_weights, "gathered by FSDP, or autocast copies"),
        MemoryPart("unsharded gradients", states.gradient_buffers + between, "before their reduce-scatter"),
        *activation_parts(workload, layout, layers, pp_rank, scores),
        MemoryPart("logits and loss", logits),
        MemoryPart(APART, -min(logits, after_loss), "backward recomputes and reduces after the loss"),
        MemoryPart("communication buffers", _communication_buffers(workload, layout)),
    ]
    parts += _objective_parts(workload, layout, parts)
    allocated = sum(part.bytes for part in parts)
    if device.type == "cuda":
        parts += [
            MemoryPart(CONTEXT, CUDA_CONTEXT, LAZY_NOTE),
            MemoryPart(GROUPS, _communicators(layout), "NCCL"),
            MemoryPart(MARGIN, round(FRAGMENTATION * allocated), f"{FRAGMENTATION:.0%} of the tensors"),
        ]
    host = sum(part.bytes for part in on_host) if offloads else 0
    return MemoryPlan(pp_rank, [part for part in parts if part.bytes], host, state.bytes if in_files else 0)


def _objective_parts(workload: Workload, layout: Layout, parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """A teacher is there all the time. Answers are sampled before the forward pass, which needs their cache no more."""
    found = []
    if (teacher := plan_teacher(workload, layout)) is not None:
        size = "assumed as large as the model" if teacher.is_assumed else f"{show_count(teacher.parameters)} parameters"
        found.append(MemoryPart("teacher weights in bf16", teacher.weights, f"sharded as the model; {size}"))
        found.append(MemoryPart("logits of the teacher", teacher.logits))
    if (rollouts := plan_rollouts(workload, layout)) is not None:
        note = f"{rollouts.rows} answers at a time, {rollouts.length:,} tokens each"
        found.append(MemoryPart("KV cache of sampled answers", rollouts.cache, note))
        later = sum(part.bytes for part in parts if part.name.startswith(("activations", "logits")))
        found.append(MemoryPart(APART, -min(rollouts.cache, later), "answers are sampled before"))
    return found


@dataclass(frozen=True)
class _StateBytes:
    """Bytes of state of a pipeline rank, before data parallelism shards them."""

    weights: float
    gradients: float
    optimizer: float
    compute_weights: int
    """Gathered by FSDP at one time, or copied by autocast."""
    gradient_buffers: int
    between_micro_batches: int
    """Gradients, if they stay unsharded."""


@dataclass(frozen=True)
class FsdpUnits:
    """Unsharded elements of what FSDP gathers together, in a model or a pipeline stage, in the order of forward."""

    first: int
    """The embedding; 0 if it is with the rest."""
    blocks: list[int]
    last: int
    """Last norm and head; 0 if they are with the rest."""
    rest: int
    """What the root holds, gathered for all of forward and backward."""

    @property
    def total(self) -> int:
        return self.first + sum(self.blocks) + self.last + self.rest

    def gathered_elements(self, frees: bool | int) -> int:
        """At the worst moment of forward and backward, with the buffers of all-gathers.

        ``frees`` is what FSDP does after forward (``reshard_after_forward``).
        """
        if frees is False:
            return self.total
        # A unit is copied out of the buffer of its all-gather while the previous unit's is still there. The last
        # block stays gathered for its backward pass.
        units = [unit for unit in (self.first, *self.blocks, self.last) if unit]
        peak = max((before + 2 * unit for before, unit in itertools.pairwise([0, *units])), default=0)
        peak = max(peak, 2 * (self.blocks[-1] + self.last)) if self.last and self.blocks else peak
        freed = max(0, self.total - self.rest - peak)
        return self.rest + peak + (0 if frees is True else freed // frees)

    def gradient_buffers(self, itemsize: int) -> int:
        """Bytes of gradients on their way: one unit is reduce-scattered from a buffer in fp32 while backward computes
        the gradient of the next. The root's gradients wait for the end."""
        in_order = itertools.pairwise([self.last, *reversed(self.blocks), self.first, 0])
        moving = [FP32_BYTES * reduced + itemsize * max(reduced, computed) for reduced, computed in in_order]
        return max(max(moving) + itemsize * self.rest, (FP32_BYTES + itemsize) * self.rest)


@functools.lru_cache(maxsize=4096)
def _state_bytes(
    workload: Workload, stages: tuple[range, ...], tp: int, ep: int, frees: bool | int | None
) -> _StateBytes:
    """``frees`` is what FSDP does after forward; None is without FSDP."""
    parts, itemsize = workload.parts, workload.itemsize
    first, unit = any(0 in stage for stage in stages), parts.of_stages(stages)
    # Ranks of ep are ranks of dp_shard and cp too: all of these together hold one copy of the experts.
    elements, trained, state = (split.on_rank(tp, ep=1) for split in (unit.elements, unit.trained, unit.state))
    stored = weight_dtype(workload.optimizer).itemsize
    if frees is None:
        copied = elements - (parts.looked_up / tp if first else 0)
        compute = round(itemsize * copied) if itemsize < stored else 0
        return _StateBytes(stored * elements, stored * trained, state, compute, 0, 0)
    units = [_fsdp_units(workload, stage, tp, ep) for stage in stages]
    reduced = [_fsdp_units(workload, stage, tp, ep, trained=True) for stage in stages]
    return _StateBytes(
        weights=stored * elements,
        gradients=stored * trained,
        optimizer=state,
        compute_weights=itemsize * sum(one.gathered_elements(frees) for one in units),
        gradient_buffers=max(one.gradient_buffers(itemsize) for one in reduced),
        between_micro_batches=stored * sum(one.total for one in reduced),
    )


def _fsdp_units(workload: Workload, stage: range, tp: int, ep: int, *, trained: bool = False) -> FsdpUnits:
    """The units of all weights, or only of weights with a gradient."""

    def count(unit: Unit) -> int:
        return round((unit.trained if trained else unit.elements).on_rank(tp, ep))

    parts = workload.parts
    return FsdpUnits(
        first=count(parts.first) if 0 in stage else 0,
        blocks=[count(parts.blocks[layer]) for layer in stage],
        last=count(parts.last) if workload.last_layer in stage else 0,
        rest=count(parts.rest),
    )


def activation_parts(
    workload: Workload, layout: Layout, layers: tuple[int, ...], pp_rank: int, score_bytes: int = 0
) -> list[MemoryPart]:
    """Activations by part of the block: what is kept with it, less what is kept without it."""
    in_flight = micro_batches_in_flight(layout.parallel, pp_rank, layout.batch.micro_batches)
    gathered_keys = layout.dims.cp if layout.parallel.cp_attention == "allgather" else 1
    shards = ActivationShards(layout.dims.tp, layout.parallel.sp, gathered_keys)
    budget = layout.parallel.activation_checkpointing == "budget"
    share = layout.micro_tokens * (layout.parallel.activation_budget if budget else 1.0)
    kept = _activations_per_token(workload, layers, shards, _activation_policy(layout, score_bytes))
    names = ("activations: feed-forward", "activations: attention", "activations: norms and residual stream")
    note = f"{in_flight:g} x {layout.micro_tokens:,} tokens in flight"
    return [
        MemoryPart(name, round(share * (in_flight * each + once)), note)
        for name, (each, once) in zip(names, kept, strict=True)
    ]


def _recomputed_bytes(workload: Workload, layout: Layout, layers: tuple[int, ...], score_bytes: int) -> int:
    """Activations that are there only while backward recomputes a block."""
    shards = ActivationShards(layout.dims.tp, layout.parallel.sp)
    policy = _activation_policy(layout, score_bytes)
    once, kept = (
        sum(part for _, part in _activations_per_token(workload, layers, shards, one))
        for one in (policy, replace(policy, recompute="none"))
    )
    return max(0, round(layout.micro_tokens * (once - kept)))


def _activation_policy(layout: Layout, score_bytes: int) -> ActivationPolicy:
    parallel = layout.parallel
    return ActivationPolicy(
        layout.recompute, parallel.activation_checkpointing_every, parallel.activation_offload, score_bytes
    )


@functools.lru_cache(maxsize=4096)
def _activations_per_token(
    workload: Workload, layers: tuple[int, ...], shards: ActivationShards, policy: ActivationPolicy
) -> list[tuple[float, float]]:
    """Bytes of a token for every micro-batch in flight, and once, by part."""
    full = workload.config
    moe = full.moe and full.moe.model_copy(update={"moe_intermediate_size": 0})
    without_mlp = full.model_copy(update={"intermediate_size": 0, "moe": moe})
    no_heads = {"num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": full.head_size}
    found = []
    for config in (full, without_mlp, without_mlp.model_copy(update=no_heads)):
        once, both = (
            activation_bytes(
                config, _MANY, half=workload.half, policy=policy, layers=layers, micro_batches=count, shards=shards
            )
            for count in (0.0, 1.0)
        )
        found.append(((both - once) / _MANY, once / _MANY))
    rows = [*found, (0.0, 0.0)]
    return [(more[0] - less[0], more[1] - less[1]) for more, less in itertools.pairwise(rows)]


def _logits(workload: Workload, layout: Layout, device: torch.device) -> int:
    return loss_bytes(workload.config, layout.micro_tokens, half=workload.half, device=device, tp=layout.dims.tp)


def _communication_buffers(workload: Workload, layout: Layout) -> int:
    """What collectives of activations write to: gathered tokens of tp, tokens of other ranks' experts, streams."""
    dims, hidden = layout.dims, workload.config.hidden_size
    stream = layout.micro_tokens * hidden * (4 if workload.config.residual_fp32 else workload.itemsize)
    gathered = layout.micro_tokens * hidden * workload.itemsize
    moe = workload.config.moe
    routed = 2 * gathered * moe.num_experts_per_tok if moe is not None and dims.ep > 1 else 0
    return round((2 * gathered if dims.tp > 1 else 0) + (2 * stream / dims.tp if dims.pp > 1 else 0) + routed)


def _communicators(layout: Layout) -> int:
    dims = layout.dims
    if dims.world_size == 1:
        return 0
    used = sum(size > 1 for size in (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep))
    return COMMUNICATORS + GROUP * (used - 1)
