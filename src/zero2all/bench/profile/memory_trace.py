"""``z2a plan --trace``: the memory of a rank by running one layer of each kind on tensors without memory.

The parallel layers, FSDP, activation checkpointing, the loss and the optimizer run as in training, as one rank of a
process group whose collectives do nothing. The kernels are a CPU's, as in the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from pydantic import computed_field
from torch import Tensor

from zero2all.base.errors import UsageError
from zero2all.base.torch_private import (
    fake_tensor_mode,
    fake_tensor_type,
    gathered_weights,
    init_fake_process_group,
    to_copy,
)
from zero2all.base.units import show_bytes
from zero2all.model import Z2all
from zero2all.model.cost.activations import BlockActivations, held_bytes, is_offloaded, recomputed_groups
from zero2all.model.cost.model_size import weight_dtype
from zero2all.optim.optimizer import build_optimizers
from zero2all.parallel.context_parallel import ContextParallel
from zero2all.parallel.fsdp import reshard_after_forward
from zero2all.parallel.mesh import ParallelMesh
from zero2all.parallel.parallelize import parallelize
from zero2all.parallel.pipeline_parallel import micro_batches_in_flight
from zero2all.parallel.sharded_init import to_local
from zero2all.parallel.storage_tracker import Allocation, StorageTracker
from zero2all.parallel.tensor_parallel import apply_tp_ops
from zero2all.planner.rank_plan import MemoryPlan, fullest_ranks, plan_rank_memory
from zero2all.planner.workload import Layout, Workload
from zero2all.recipe import ModelConfig, ParallelRecipe, Recipe, ResolvedStage

CPU = torch.device("cpu")
OF_A_KIND = 2  # layers of each kind: one that is checkpointed and one that is not
# Autograd adds gradients in place, but not while a mode is active.
IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
EMBEDDING, NORM, HEAD, MTP = "embed_tokens", "norm", "lm_head", "mtp"


@dataclass(frozen=True)
class TracedPart:
    name: str
    formula: int
    traced: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def difference(self) -> float:
        """The error of the formula, relative to the trace."""
        return self.formula / self.traced - 1 if self.traced else float(self.formula > 0)


@dataclass(frozen=True)
class MemoryTrace:
    """Bytes of a rank by formula and by tracing."""

    pp_rank: int
    parts: list[TracedPart]

    @property
    def worst(self) -> TracedPart:
        return max(self.parts, key=lambda part: abs(part.difference))


def trace_memory(recipe: Recipe, stage: ResolvedStage, gpus: int) -> list[MemoryTrace]:
    """Trace the pipeline ranks that may hold the most in a stage of training."""
    workload, layout = Workload.of(recipe, stage), Layout.of(recipe, stage, gpus)
    traced = _trace_layers(workload, layout, recipe)
    return [
        MemoryTrace(rank, _compare(plan_rank_memory(workload, layout, rank, CPU), traced, workload, layout))
        for rank in fullest_ranks(workload, layout)
    ]


def trace_lines(traces: Sequence[MemoryTrace]) -> list[str]:
    """A table for each pipeline rank."""
    lines = []
    for trace in traces:
        where = f" of pipeline rank {trace.pp_rank}" if len(traces) > 1 else ""
        lines += ["", f"memory{where} {'formula':>{34 - len(where)}}{'traced':>10}, kernels as on a CPU"]
        for part in trace.parts:
            sizes = f"{show_bytes(part.formula):>10}{show_bytes(part.traced):>10}"
            lines.append(f"  {part.name:<30}{sizes}{part.difference:>+8.1%}")
    return lines


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a process group whose collectives do nothing."""
    if dist.is_initialized():
        raise UsageError("this process is a rank of a group already; run this command on its own")
    init_fake_process_group(rank, world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class TracedBytes:
    """What one layer of each kind and both ends hold, by the name of the module."""

    config: ModelConfig
    weights: dict[str, int]
    gradients: dict[str, int]
    optimizer: dict[str, int]
    gathered: dict[str, int]
    """Weights that FSDP has gathered at one time, or copies of autocast."""
    gathered_peak: int
    kept: dict[str, int]
    """Bytes kept from forward to backward."""
    logits: int
    """Bytes of head and loss at their worst moment, without gathered weights and the gradient of the head."""

    def layer_name(self, *, is_moe: bool, checkpointed: bool) -> str:
        first = OF_A_KIND if is_moe and not self.config.is_moe_layer(0) else 0
        return f"layers.{first + (0 if checkpointed else 1)}"


def _compare(formula: MemoryPlan, traced: TracedBytes, workload: Workload, layout: Layout) -> list[TracedPart]:
    config, every = workload.config, layout.parallel.activation_checkpointing_every
    layers = [layer for stage in layout.stages_of(workload, formula.pp_rank) for layer in stage]
    names = [traced.layer_name(is_moe=config.is_moe_layer(layer), checkpointed=True) for layer in layers]
    has_first, has_last = 0 in layers, workload.last_layer in layers
    tied = config.tie_word_embeddings
    ends = [*([EMBEDDING] if has_first or tied else []), *([NORM, HEAD] if has_last else []), MTP]

    def total(by_module: dict[str, int]) -> int:
        return sum(by_module.get(name, 0) for name in [*names, *ends])

    frees = layout.uses_fsdp and layout.frees_weights
    blocks = [
        _block_activations(traced, name, is_moe=config.is_moe_layer(layer), offloaded=offloaded)
        for name, layer in zip(names, layers, strict=True)
        for offloaded in [layout.parallel.activation_offload and is_offloaded(layer, config)]
    ]
    if layout.recompute == "full":
        blocks = recomputed_groups(blocks, every)
    blocks += [BlockActivations(traced.kept.get(MTP, 0))]
    in_flight = micro_batches_in_flight(layout.parallel, formula.pp_rank, layout.batch.micro_batches)
    budget = layout.parallel.activation_budget if layout.parallel.activation_checkpointing == "budget" else 1.0
    # A block is counted with its output, so the input of the first one is left over.
    end = traced.kept[EMBEDDING] + traced.kept[NORM] if has_last else 0
    kept = budget * (held_bytes(blocks, in_flight) + end)
    parts = [
        TracedPart("weights (stored)", formula.bytes_of("weights (stored)"), total(traced.weights)),
        TracedPart("gradients", formula.bytes_of("gradients"), total(traced.gradients)),
        TracedPart("optimizer state", formula.bytes_of("optimizer state"), total(traced.optimizer)),
        TracedPart(
            f"weights in {workload.precision}",
            formula.bytes_of(f"weights in {workload.precision}"),
            traced.gathered_peak if frees else total(traced.gathered),
        ),
        TracedPart("activations", formula.bytes_of("activations"), round(kept)),
        TracedPart("logits and loss", formula.bytes_of("logits and loss"), traced.logits if has_last else 0),
    ]
    return [part for part in parts if part.formula or part.traced]


def _block_activations(traced: TracedBytes, name: str, *, is_moe: bool, offloaded: bool) -> BlockActivations:
    full = traced.kept[traced.layer_name(is_moe=is_moe, checkpointed=False)]
    return BlockActivations(traced.kept[name], max(0, full - traced.kept[name]), offloaded)


def _trace_layers(workload: Workload, layout: Layout, recipe: Recipe) -> TracedBytes:
    config, parallel = _small_model(workload.config), _one_stage(layout.parallel)
    dims = replace(layout.dims, pp=1, ep=1)
    has_group = dims.world_size > 1
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[workload.precision]
    stored = weight_dtype(workload.optimizer)
    with fake_process_group(0, dims.world_size) if has_group else nullcontext():
        mesh = ParallelMesh(dims, CPU, has_group=has_group)
        local = parallelize(config, parallel, mesh, dtype, weight_dtype=stored)
        model = local.model_parts[0]
        for name, block in model.layers.named_children():  # one block of each kind shows what is recomputed
            if int(name) % OF_A_KIND:
                vars(block).pop("forward", None)
        tp = mesh.get_mesh("tp") if dims.tp > 1 else None
        context_parallel = ContextParallel(mesh.get_mesh("cp"), parallel) if dims.cp > 1 else None
        if context_parallel is not None:  # while tensors have values
            context_parallel.local_positions(layout.seq_len, CPU)
        with fake_tensor_mode():
            model.to_empty(device=CPU)
            model.init_buffers(CPU)
            if tp is not None:
                apply_tp_ops(model, tp)
            if context_parallel is not None:
                context_parallel.apply(model)
            tracker = TraceTracker(model)
            tokens = torch.zeros(layout.batch.samples, layout.seq_len // dims.cp, dtype=torch.int64)
            casts = not local.uses_fsdp and dtype != stored
            with tracker, torch.autocast("cpu", dtype, enabled=casts):
                kept = tracker.run(tokens)
            optimizers = build_optimizers(model, recipe.train.optimizer)
            for optimizer in optimizers:
                optimizer.step()
            states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    parameters = dict(model.named_parameters())
    return TracedBytes(
        config=config,
        weights=_by_module((name, parameter) for name, parameter in parameters.items()),
        gradients=_by_module((name, one.grad) for name, one in parameters.items() if one.grad is not None),
        optimizer=_by_module(
            (name, value)
            for name, parameter in parameters.items()
            for value in states.get(parameter, {}).values()
            if isinstance(value, Tensor)
        ),
        gathered=tracker.gathered(),
        gathered_peak=tracker.gathered_peak(),
        kept=kept,
        logits=tracker.logits_peak(),
    )


class TraceTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Which module allocated what in one forward and backward pass of a model whose tensors have no memory."""

    def __init__(self, model: Z2all) -> None:
        super().__init__(CPU)
        self.KINDS = (*self.KINDS, fake_tensor_type())
        self._model = model
        self._place: str | None = None
        self._own = {id(to_local(parameter).untyped_storage()) for parameter in model.parameters()}
        self._events: list[tuple[Allocation, int]] = []
        self._copies: set[Allocation] = set()  # of weights, by autocast
        self._gathered: dict[str, set[Allocation]] = {}
        self._head_gradient: set[Allocation] = set()
        self._buffers: set[Allocation] = set()  # of all-gathers, from which weights are copied
        self._in_head_backward = False
        for name, module in self._modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            module.register_forward_hook(lambda *args, name=name: self._leave(name, args[-1]))

    def _modules(self) -> Iterator[tuple[str, Any]]:
        for number, block in self._model.layers.named_children():
            yield f"layers.{number}", block
        for name in (EMBEDDING, NORM, HEAD, MTP):
            if getattr(self._model, name) is not None:
                yield name, getattr(self._model, name)

    def run(self, tokens: Tensor) -> dict[str, int]:
        """Forward and backward; what is kept between the two, by module."""
        for tensor in (*self._model.parameters(), *self._model.buffers(), tokens):
            self.track(tensor, None)
        losses = self._model(tokens, targets_BS=tokens)
        known = {*self._copies, *self._buffers, *self.allocations(gathered_weights(self._model))}
        kept: dict[str, int] = {}
        for one in self.live.values():
            if one.label is not None and one not in known:
                kept[one.label] = kept.get(one.label, 0) + one.size
        self._place, self._in_head_backward = HEAD, True
        losses.sum().backward()
        self._place = None
        found: set[Allocation] = set()
        for name, module in self._modules():  # norm and head are gathered together
            gathered = set(self.allocations(gathered_weights(module))) - found
            self._gathered[name] = gathered | {one for one in self._copies if one.label == name}
            found |= gathered
        return kept

    def label(self) -> str | None:
        return self._place

    def changed(self, allocation: Allocation, growth: int) -> None:
        self._events.append((allocation, growth))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_head_backward:
            op = IN_PLACE.get(op, op)
        result = super().__torch_dispatch__(op, types, args, kwargs)
        if op is torch.ops.fsdp.all_gather_copy_in.default:
            self._buffers.update(self.allocations([result[1]]))
        if op is to_copy and id(to_local(args[0]).untyped_storage()) in self._own:
            self._copies.update(self.allocations([result]))
        return result

    def gathered(self) -> dict[str, int]:
        """Weights in the compute dtype, by module."""
        return {name: sum(self._peak({one}) for one in own) for name, own in self._gathered.items()}

    def gathered_peak(self) -> int:
        return self._peak(self._buffers.union(*self._gathered.values()))

    def logits_peak(self) -> int:
        weights = self._head_gradient.union(*self._gathered.values())
        return self._peak({one for one, _ in self._events if one.label == HEAD} - weights)

    def _peak(self, counted: set[Allocation]) -> int:
        """The most that these had together at any time."""
        growths = (growth for allocation, growth in self._events if allocation in counted)
        return max(itertools.accumulate(growths), default=0)

    def _enter(self, name: str) -> None:
        self._place = name
        if name == HEAD and torch.is_grad_enabled():
            mark = lambda gradient: self._head_gradient.update(self.allocations([gradient]))  # noqa: E731
            self._model.lm_head.weight.register_hook(mark)  # type: ignore[no-untyped-call]

    def _leave(self, name: str, output: Any) -> None:
        self._place = name if name == EMBEDDING else None  # the residual stream is its output in another dtype
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad and name != HEAD:

            def reached(_: Tensor) -> None:
                self._place, self._in_head_backward = name, False

            first.register_hook(reached)


def _small_model(config: ModelConfig) -> ModelConfig:
    """Two layers of each kind."""
    kinds = {config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)}
    moe = config.moe and config.moe.model_copy(update={"first_k_dense_replace": 0 if kinds == {True} else OF_A_KIND})
    return config.model_copy(update={"num_hidden_layers": OF_A_KIND * len(kinds), "moe": moe})


def _one_stage(parallel: ParallelRecipe) -> ParallelRecipe:
    """The recipe of one pipeline stage on a rank. Other ranks' experts get as many tokens as its own in the mean."""
    frees = reshard_after_forward(parallel)
    return parallel.model_copy(
        update={
            "pp": 1,
            "ep": 1,
            "offload": "none",
            "activation_offload": False,
            "activation_checkpointing_every": 1,
            "activation_checkpointing": "none"
            if parallel.activation_checkpointing == "budget"
            else parallel.activation_checkpointing,
            "reshard_after_forward": parallel.reshard_after_forward if frees else "never",
        }
    )


def _by_module(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, tensor in tensors:
        parts = name.split(".")
        module = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        local = to_local(tensor)
        found[module] = found.get(module, 0) + local.numel() * local.element_size()
    return found
