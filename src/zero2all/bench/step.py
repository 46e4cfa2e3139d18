"""One configuration of a training step in a process of its own, so that nothing of another is in its memory or caches.

``python -m zero2all.bench.step`` reads ``{"recipe": YAML, "steps": N, "plain_adamw": false}`` on stdin and prints
what it measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zero2all.errors import Z2aError
from zero2all.hardware import compute_dtype, pick_device, synchronize, wants_compile
from zero2all.model import Z2all
from zero2all.model.cost.optimizer_state import weight_dtype
from zero2all.model.weights import set_weight_dtype
from zero2all.processes import end_with_parent
from zero2all.recipe import Recipe, parse_recipe, recipe_yaml
from zero2all.records import parse_record
from zero2all.train.optimizer import build_optimizers


class BenchStep:
    """A model, its optimizers and one batch of made-up tokens. ``run()`` is what the training loop does each step."""

    def __init__(self, recipe: Recipe, plain_adamw: bool = False) -> None:
        self.recipe, self.device = recipe, pick_device(recipe.train.device)
        with torch.device(self.device):
            self.model = Z2all(recipe.model).init_weights(recipe.seed)
        set_weight_dtype(self.model, weight_dtype(recipe.train.optimizer))
        self.optimizers = build_optimizers(self.model, recipe.train.optimizer)
        if plain_adamw:
            _disable_fused_adamw(self.optimizers)
        options = recipe.train
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
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                losses = self.model(micro[:, :-1], targets_BS=micro[:, 1:])
            loss = losses.sum() / options.tokens_per_step
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.optimizer.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total.item()

    def time_run(self) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        self.run()
        synchronize(self.device)
        return time.perf_counter() - start

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
class StepMeasurement:
    first_seconds: float
    """With warming up."""
    seconds: list[float]
    """Of each step after it."""
    peak_bytes: int
    loss: float


def measure_step(recipe: Recipe, steps: int, plain_adamw: bool = False) -> StepMeasurement:
    step = BenchStep(recipe, plain_adamw)
    first = step.time_run()
    loss = step.run()
    return StepMeasurement(
        first_seconds=first,
        seconds=[step.time_run() for _ in range(steps)],
        peak_bytes=step.peak_bytes(),
        loss=loss,
    )


def measure_in_process(recipe: Recipe, steps: int, plain_adamw: bool, timeout: float) -> StepMeasurement:
    """``measure_step`` in a fresh process."""
    order = json.dumps({"recipe": recipe_yaml(recipe), "steps": steps, "plain_adamw": plain_adamw})
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
    order = json.load(sys.stdin)
    measured = measure_step(parse_recipe(order["recipe"]), order["steps"], order["plain_adamw"])
    sys.stdout.write(json.dumps(asdict(measured)) + "\n")


if __name__ == "__main__":
    main()
