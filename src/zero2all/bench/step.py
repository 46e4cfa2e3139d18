"""One configuration of a training step in a process of its own, so that nothing of another is in its memory or caches.

``python -m zero2all.bench.step`` reads a ``StepOrder`` on stdin and prints what it measured, both as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import compute_dtype, pick_device, synchronize, wants_compile
from zero2all.base.processes import end_with_parent
from zero2all.base.records import parse_record
from zero2all.model import Z2all
from zero2all.model.blocks import Attention
from zero2all.model.cost.model_size import weight_dtype
from zero2all.model.ops.attention import AttentionBackend
from zero2all.model.weights import set_weight_dtype
from zero2all.optim.optimizer import build_optimizers
from zero2all.recipe import ModelConfig, Recipe, parse_recipe, recipe_yaml

Clock = Literal["wall", "CPU"]
Layout = Literal["BSHE", "BHSE", "SBHE"]
"""Memory order of queries, keys and values: batch first, as the model has them; copied to heads first; sequence first,
as Megatron has all activations. B batch, S sequence, H heads, E head size."""


@dataclass(frozen=True)
class StepOptions:
    """What no recipe asks for, because it is slower."""

    plain_adamw: bool = False
    unpadded_vocabulary: bool = False
    layout: Layout = "BSHE"


class UnpaddedConfig(ModelConfig):
    @property
    def padded_vocab_size(self) -> int:
        return self.vocab_size or 0


def bench_config(recipe: Recipe, options: StepOptions) -> ModelConfig:
    """The model of a step."""
    if options.unpadded_vocabulary:
        return UnpaddedConfig.model_validate(recipe.model.model_dump())
    return recipe.model


class SequenceFirstAttention(nn.Module):
    """The attention of a model whose activations are [S, B, D]; everything else takes tokens one by one."""

    def __init__(self, attention: Attention, rotary: Tensor, mask: Any) -> None:
        super().__init__()
        self.attention, self.rotary, self.mask, self.layer = attention, rotary, mask, attention.layer

    def forward(self, x_SBD: Tensor, *batch_first: Any) -> Tensor:
        inner, (length, batch, _) = self.attention, x_SBD.shape
        q, k, v = (
            projection(x_SBD).view(length, batch, -1, inner.head_size).permute(1, 2, 0, 3)
            for projection in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        if inner.q_norm is not None and inner.k_norm is not None:
            q, k = inner.q_norm(q).type_as(v), inner.k_norm(k).type_as(v)
        q, k = inner.ops.rope(q, k, self.rotary)
        out_BHSE = inner.ops.attention.attend(q, k, v, self.mask)
        out: Tensor = inner.o_proj(out_BHSE.permute(2, 0, 1, 3).reshape(length, batch, -1))
        return out


def set_layout(model: Z2all, layout: Layout, length: int) -> None:
    if layout == "BHSE":
        attend = model.ops.attention.attend
        model.ops.attention = AttentionBackend(
            model.ops.attention.mask_for,
            lambda q, k, v, mask: attend(q.contiguous(), k.contiguous(), v.contiguous(), mask),
        )
    elif layout == "SBHE":
        rotary, masks = model.rotary(length, None), model.attention_masks(length, None)
        for layer in model.layers:
            wrapped = SequenceFirstAttention(layer.self_attn, rotary, masks[layer.window])  # type: ignore[arg-type, index]
            layer.add_module("self_attn", wrapped)


class BenchStep:
    """A model, its optimizers and one batch of made-up tokens. ``run()`` is what the training loop does each step."""

    def __init__(self, recipe: Recipe, extra: StepOptions | None = None) -> None:
        self.recipe, self.device = recipe, pick_device(recipe.train.device)
        self.extra = extra or StepOptions()
        with torch.device(self.device):
            self.model = Z2all(bench_config(recipe, self.extra)).init_weights(recipe.seed)
        set_weight_dtype(self.model, weight_dtype(recipe.train.optimizer))
        self.optimizers = build_optimizers(self.model, recipe.train.optimizer)
        if self.extra.plain_adamw:
            _disable_fused_adamw(self.optimizers)
        options = recipe.train
        set_layout(self.model, self.extra.layout, options.seq_len)
        shape = (options.batch_samples, options.seq_len + 1)
        generator = torch.Generator().manual_seed(recipe.seed)
        batch = torch.randint(0, recipe.model.vocab_size or 1, shape, generator=generator).to(self.device)
        self.micro_batches: tuple[Tensor, ...] = torch.split(
            batch, options.effective_micro_batch_tokens // options.seq_len
        )
        if wants_compile(options.compile, self.device):
            for layer in self.model.layers:
                layer.compile()

    def run(self) -> float:
        options = self.recipe.train
        total = torch.zeros((), device=self.device)
        dtype = compute_dtype(options.compute_precision, self.device)
        for micro in self.micro_batches:
            tokens, targets = micro[:, :-1], micro[:, 1:]
            if self.extra.layout == "SBHE":
                tokens, targets = tokens.t(), targets.t()
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                losses = self.model(tokens, targets_BS=targets)
            loss = losses.sum() / options.tokens_per_step
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.optimizer.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total.item()

    @property
    def clock(self) -> Clock:
        """CPU time where one thread does all the work: what other programs do is not in it."""
        return "CPU" if self.device.type == "cpu" and torch.get_num_threads() == 1 else "wall"

    def time_run(self) -> float:
        read = time.process_time if self.clock == "CPU" else time.perf_counter
        synchronize(self.device)
        start = read()
        self.run()
        synchronize(self.device)
        return read() - start

    def peak_bytes(self) -> int:
        """The most that tensors take at any moment of a step: what stays between steps, and what comes and goes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.run()
            return torch.cuda.max_memory_allocated(self.device)
        return self._resident_bytes() + _peak_cpu_bytes(self)

    def _resident_bytes(self) -> int:
        states = [
            value for optimizer in self.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        tensors = [*self.model.parameters(), *self.model.buffers(), *(s for s in states if isinstance(s, Tensor))]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())


def _disable_fused_adamw(optimizers: list[torch.optim.Optimizer]) -> None:
    """AdamW's reference kernel, which no recipe would ask for: a Python loop over parameters."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.AdamW):
            for group in optimizer.param_groups:
                group |= {"fused": False, "foreach": False}


def _peak_cpu_bytes(step: BenchStep) -> int:
    """CPU has no allocator statistics; the profiler's events, added up in order of time, are the same thing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.run()
    results: Any = profiler.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


@dataclass(frozen=True)
class StepOrder:
    """What the process is to measure."""

    recipe: str
    """YAML."""
    steps: int
    options: StepOptions


@dataclass(frozen=True)
class StepMeasurement:
    clock: Clock
    first_seconds: float
    """The first step, with warming up."""
    seconds: list[float]
    """The duration of each step after the first."""
    peak_bytes: int
    loss: float


def measure_step(recipe: Recipe, steps: int, options: StepOptions) -> StepMeasurement:
    step = BenchStep(recipe, options)
    first = step.time_run()
    loss = step.run()
    return StepMeasurement(
        clock=step.clock,
        first_seconds=first,
        seconds=[step.time_run() for _ in range(steps)],
        peak_bytes=step.peak_bytes(),
        loss=loss,
    )


def measure_in_process(recipe: Recipe, steps: int, options: StepOptions, timeout: float) -> StepMeasurement:
    """``measure_step`` in a fresh process."""
    order = json.dumps(asdict(StepOrder(recipe_yaml(recipe), steps, options)))
    command = [sys.executable, "-m", "zero2all.bench.step", str(os.getpid())]
    try:
        done = subprocess.run(command, input=order, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Z2aError(f"no answer in {timeout:.0f} s: give a smaller shape or batch, or more time") from None
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise Z2aError(last)
    return parse_record(StepMeasurement, json.loads(done.stdout.splitlines()[-1]), "the measuring process")


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    order = parse_record(StepOrder, json.load(sys.stdin), "the order")
    measured = measure_step(parse_recipe(order.recipe), order.steps, order.options)
    sys.stdout.write(json.dumps(asdict(measured)) + "\n")


if __name__ == "__main__":
    main()
