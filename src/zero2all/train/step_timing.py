"""The speed of training on this device, measured with a few real steps. Nothing is written."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero2all.base.console import progress
from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import PeakFlops, compute_dtype, peak_at_least, peak_flops, synchronize
from zero2all.base.units import show_bytes, show_seconds
from zero2all.model import ModelInputs, document_starts
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.cost.model_size import weight_dtype
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.mesh import ParallelDims
from zero2all.planner.rank_plan import plan_memory
from zero2all.planner.workload import Layout, Workload
from zero2all.recipe import ParallelRecipe, Recipe, ResolvedStage
from zero2all.train.micro_batch import free_device_memory

TIMED_STEPS = 3  # after one to warm up
MAX_PASS_SECONDS = 5.0  # of a timed forward and backward pass: fewer samples are timed if a micro-batch takes longer
MAX_SAMPLE_SECONDS = 60.0  # a device that takes longer for one sample is not measured
EXPECTED_MFU = 0.2  # to predict how long a pass will take


@dataclass(frozen=True)
class StepTiming:
    """What the timed steps took in one process."""

    flops: float
    """FLOPs per second of forward and backward passes, as MFU counts them."""
    update_seconds: float
    """Gradient clipping and optimizer."""
    peak: PeakFlops
    samples: int
    """Samples in a timed forward pass."""


def time_steps(
    recipe: Recipe, stage: ResolvedStage, tokens: Tensor, is_first: Tensor | None, device: torch.device
) -> StepTiming:
    """Train samples ``tokens`` [samples, seq_len + 1] for a few steps in memory; fewer if all would take too long.

    The recipe has its vocabulary and its hyperparameters; ``is_first`` marks the first token of each document, for the
    document mask. Blocks are not compiled, which could take minutes.
    """
    options, config = recipe.train, recipe.model
    dtype = compute_dtype(options.compute_precision, device)
    peak = peak_flops(device, dtype)
    sample_flops = stage.seq_len * flops_per_token(config, stage.seq_len).model
    sample_seconds = sample_flops / (EXPECTED_MFU * peak.flops)
    if sample_seconds > MAX_SAMPLE_SECONDS:
        raise Z2aError(f"one sample would take about {show_seconds(sample_seconds)} on this {device.type}")
    samples = max(1, min(len(tokens), int(MAX_PASS_SECONDS / sample_seconds)))
    mode, parallel = recipe.parallel.activation_checkpointing, recipe.parallel
    single = ParallelRecipe(
        activation_checkpointing="none" if mode == "budget" else mode,
        activation_checkpointing_every=parallel.activation_checkpointing_every,
        activation_offload=parallel.activation_offload,
    )
    _require_memory(recipe.model_copy(update={"parallel": single}), stage, samples * stage.seq_len, device)
    mesh, stored = ParallelMesh(ParallelDims(), device), weight_dtype(options.optimizer)
    model = ParallelModel(config, single, mesh, seed=recipe.seed, dtype=dtype, weight_dtype=stored)
    optimizers = build_optimizers(model.model, options.optimizer, model.param_groups, config.mup_width_mult)
    set_learning_rate(optimizers, options.optimizer, lr_multiplier=0.01)
    inputs, targets = tokens[:samples, :-1], tokens[:samples, 1:]
    starts = None if is_first is None else document_starts(is_first[:samples, :-1])
    pass_seconds, update_seconds = [], []
    with progress("timing a few steps", 1 + TIMED_STEPS) as advance:
        for _ in range(1 + TIMED_STEPS):
            begin = time.perf_counter()
            model.forward_backward(ModelInputs(inputs, targets, doc_starts_BS=starts), divisor=targets.numel())
            synchronize(device)
            middle = time.perf_counter()
            model.clip_grad_norm_(options.optimizer.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            pass_seconds.append(middle - begin)
            update_seconds.append(time.perf_counter() - middle)
            advance(1)
    flops = samples * sample_flops / statistics.median(pass_seconds[1:])
    return StepTiming(
        flops=flops,
        update_seconds=statistics.median(update_seconds[1:]),
        peak=peak_at_least(flops, peak, device, dtype),
        samples=samples,
    )


def _require_memory(recipe: Recipe, stage: ResolvedStage, tokens: int, device: torch.device) -> None:
    """Refuse a model that does not fit: a process that runs out of main memory is killed without a word."""
    step = replace(stage, given_batch_tokens=tokens, micro_batch_tokens=tokens, batch_ramp=None)
    needed = plan_memory(Workload.of(recipe, step, device), Layout.of(recipe, step, 1), device).peak
    free = free_device_memory(device, ranks=1)
    if free is not None and needed > free:
        raise Z2aError(f"one process needs about {show_bytes(needed)} of memory, and {show_bytes(free)} are free here")
