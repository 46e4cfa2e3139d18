"""Bytes and time of every optimizer, for the weights of one model.

All take turns in one process, on one thread, and are judged by CPU seconds, so that a busy machine spoils little.

    python -m benchmarks optimizers                                   # the 25M shape
    python -m benchmarks optimizers --preset z2all-3m --only adamw adamw-bf16
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from benchmarks.common import benchmark_parser, cpu_seconds, show, take_turns
from torch.optim import Optimizer

from zero2all.base.charts.table import markdown_table
from zero2all.model import Z2all
from zero2all.model.cost.model_size import optimizer_state_bytes, weight_dtype
from zero2all.model.weights import set_weight_dtype
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.recipe import ModelConfig, OptimizerRecipe

CONTENDERS = {
    "adamw": OptimizerRecipe(name="adamw", lr=1e-3),
    "adamw-bf16": OptimizerRecipe(name="adamw-bf16", lr=1e-3),
    "adamw-bf16-kahan": OptimizerRecipe(name="adamw-bf16-kahan", lr=1e-3),
    "adamw-8bit": OptimizerRecipe(name="adamw-8bit", lr=1e-3),
    "adafactor": OptimizerRecipe(name="adafactor", lr=1e-3),
    "lion": OptimizerRecipe(name="lion", lr=1e-4),
    "sgd": OptimizerRecipe(name="sgd", lr=0.1),
    "muon": OptimizerRecipe(name="muon", lr=1e-3, muon_lr=0.02),
}


def prepared(config: ModelConfig, recipe: OptimizerRecipe) -> list[Optimizer]:
    """With a gradient for every parameter, and after a step, which makes the state and compiles."""
    model = Z2all(config).init_weights(0)
    set_weight_dtype(model, weight_dtype(recipe))
    optimizers = build_optimizers(model, recipe)
    set_learning_rate(optimizers, recipe, lr_multiplier=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    step(optimizers)
    return optimizers


def step(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--preset", default="z2all-25m")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = ModelConfig(preset=options.preset, vocab_size=8192)
    ready = {name: prepared(config, CONTENDERS[name]) for name in options.only}
    turns = {name: partial(cpu_seconds, step, optimizers) for name, optimizers in ready.items()}
    seconds = take_turns(turns, options.turns)
    shapes = {name: weight.shape for name, weight in Z2all(config).named_parameters()}
    count = sum(shape.numel() for shape in shapes.values())
    rows = []
    for name, measured in seconds.items():
        recipe = CONTENDERS[name]
        held = sum(
            2 * weight_dtype(recipe, name).itemsize * shape.numel() + optimizer_state_bytes(recipe, name, shape)
            for name, shape in shapes.items()
        ) / count  # fmt: skip
        rows.append((name, f"{held:.2f}", f"{1e9 * statistics.median(measured) / count:.2f}"))
    show(f"{count} parameters\n\n{markdown_table(('optimizer', 'bytes per parameter', 'ns per parameter'), rows)}")
