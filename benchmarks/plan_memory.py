"""Memory that `z2a plan` predicts against what the tracker of `z2a bench profile` measures in a step, on CPU ranks.

    OMP_NUM_THREADS=1 python -m benchmarks plan_memory

Twelve small runs: dense and with experts, three sizes, with and without recomputation, FSDP on 1, 2 and 4 ranks, and
ZeRO-1. The second step of each is measured on the first rank; a rank has two micro-batches of 512 tokens. Predicted is
the peak of tensors alone: without CUDA context, communicators and fragmentation margin.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from benchmarks.common import benchmark_parser, show

from zero2all.base.charts.table import markdown_table
from zero2all.base.machine.devices import compute_dtype
from zero2all.bench.profile.memory import MemoryPeak, MemoryTracker
from zero2all.bench.rank_harness import run_ranks
from zero2all.model import ModelInputs
from zero2all.optim.optimizer import build_optimizers
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.planner.rank_plan import MemoryPlan, plan_memory
from zero2all.planner.workload import Layout, Workload, largest_stage
from zero2all.recipe import Recipe, parse_recipe
from zero2all.train.step_timer import StepTimer

CPU = torch.device("cpu")
BASE = """
tokenizer: {vocab_size: 2048}
model: {hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, num_attention_heads: 4, num_key_value_heads: 2,
  max_position_embeddings: 256, vocab_size: 2048}
train: {steps: 2, seq_len: 128, batch_tokens: 1024, micro_batch_tokens: 512, precision: fp32}
"""
SMALL = ["model.hidden_size=128", "model.intermediate_size=352", "model.num_hidden_layers=4"]
LARGE = ["model.hidden_size=384", "model.intermediate_size=1024", "model.num_hidden_layers=8"]
MOE = ["model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 256, n_shared_experts: 1}"]
FULL = ["parallel.activation_checkpointing=full"]
SELECTIVE = ["parallel.activation_checkpointing=selective"]
BF16 = ["train.precision=bf16"]
CASES: dict[str, tuple[int, list[str]]] = {
    "small": (1, SMALL),
    "medium": (1, []),
    "large": (1, LARGE),
    "medium, full recomputation": (1, FULL),
    "medium, selective recomputation": (1, SELECTIVE),
    "medium, experts": (1, MOE),
    "medium, experts, full recomputation": (1, [*MOE, *FULL]),
    "medium, FSDP on 2": (2, []),
    "large, bf16, FSDP on 2, full recomputation": (2, [*LARGE, *BF16, *FULL]),
    "medium, experts, FSDP on 2": (2, MOE),
    "medium, FSDP on 4": (4, []),
    "medium, ZeRO-1 on 2": (2, ["parallel.zero=1"]),
}


@dataclass(frozen=True)
class Comparison:
    case: str
    predicted: MemoryPlan
    measured: MemoryPeak

    @property
    def difference(self) -> float:
        return self.predicted.peak / self.measured.total - 1


def predict(recipe: Recipe, ranks: int) -> MemoryPlan:
    stage = largest_stage(recipe)
    return plan_memory(Workload.of(recipe, stage), Layout.of(recipe, stage, ranks), CPU)


def measure(recipe: Recipe) -> MemoryPeak | None:
    """Train two steps on random tokens; the peak of the second. Every rank calls it; None on others than the first."""
    stage, dtype = largest_stage(recipe), compute_dtype(recipe.train.compute_precision, CPU)
    mesh = ParallelMesh.init_distributed(recipe.parallel, CPU)
    model = ParallelModel(recipe.model, recipe.parallel, mesh, seed=0, dtype=dtype)
    optimizers = build_optimizers(model.model, recipe.train.optimizer, model.param_groups)
    assert stage.micro_batch_tokens is not None
    samples, rows = stage.batch_tokens // stage.seq_len // mesh.dims.dp, stage.micro_batch_tokens // stage.seq_len
    timer = StepTimer.for_device(CPU)
    tokens = torch.randint(0, recipe.model.padded_vocab_size, (samples, stage.seq_len + 1))
    _step(model, optimizers, timer, tokens, rows)  # allocates the state of the optimizer
    tracker = MemoryTracker(model, optimizers, timer)
    with timer.watching(model), tracker if mesh.rank == 0 else nullcontext():
        _step(model, optimizers, timer, tokens, rows)
    if mesh.rank > 0:
        return None
    return tracker.timeline().peak


def _step(
    model: ParallelModel, optimizers: list[torch.optim.Optimizer], timer: StepTimer, tokens: torch.Tensor, rows: int
) -> None:
    with timer.part("backward"):
        model.forward_backward(
            ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=tokens.numel(), micro_batch_size=rows
        )
    with timer.part("optimizer"):
        model.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def measure_all(recipes: list[Recipe]) -> list[MemoryPeak | None]:
    return [measure(recipe) for recipe in recipes]


def compare(cases: list[str]) -> list[Comparison]:
    """Those of one number of ranks in the same processes."""
    found: dict[str, Comparison] = {}
    for ranks in sorted({CASES[case][0] for case in cases}):
        names = [case for case in cases if CASES[case][0] == ranks]
        recipes = [parse_recipe(BASE, [f"train.batch_tokens={1024 * ranks}", *CASES[case][1]]) for case in names]
        peaks = measure_all(recipes) if ranks == 1 else run_ranks(ranks, measure_all, recipes, seconds=600)[0]
        for case, recipe, peak in zip(names, recipes, peaks, strict=True):
            assert peak is not None
            found[case] = Comparison(case, predict(recipe, ranks), peak)
    return [found[case] for case in cases]


def table(found: list[Comparison]) -> str:
    """In MB, predicted / measured."""
    parts = ("weights", "gathered", "gradients", "optimizer", "activations and logits", "other")
    rows = []
    for one in found:
        plan, peak = one.predicted, one.measured
        pairs = [
            (plan.peak, peak.total),
            (plan.bytes_of("weights (stored)"), peak.parameters),
            (plan.bytes_of("weights in"), peak.gathered),
            (plan.bytes_of("gradients") + plan.bytes_of("unsharded gradients"), peak.gradients),
            (plan.bytes_of("optimizer state"), peak.optimizer),
            (plan.bytes_of("activations") + plan.bytes_of("logits"), peak.activations),
        ]
        total, *items = (f"{predicted / 1e6:.1f} / {measured / 1e6:.1f}" for predicted, measured in pairs)
        rows.append([one.case, total, f"{one.difference:+.1%}", *items, f"{peak.other / 1e6:.1f} ({peak.part})"])
    worst = max(found, key=lambda one: abs(one.difference))
    lines = markdown_table(("run", "peak", "difference", *parts), rows)
    return f"{lines}\n\nworst: {worst.difference:+.1%} ({worst.case})"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--case", choices=list(CASES), help="only this one")
    case = parser.parse_args().case
    show(table(compare([case] if case else list(CASES))))
