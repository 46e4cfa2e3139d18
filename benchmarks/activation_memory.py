"""What activation checkpointing, offload and dropout cost: memory by the formula, and time measured.

    OMP_NUM_THREADS=1 python -m benchmarks activation_memory [--rounds 5]

The time is CPU time of forward and backward pass relative to no checkpointing, median of rounds in which all modes
take turns. On a CPU offload only copies: its time says nothing about a GPU, where a side stream copies.
tests/parallel/test_activation_estimate.py compares the formula with the bytes that are kept.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from benchmarks.common import benchmark_parser, cpu_seconds, show, take_turns
from torch import Tensor

from zero2all.base.charts.table import markdown_table
from zero2all.model.cost.activations import ActivationPolicy, activation_bytes
from zero2all.model.cost.flops import flops_per_token
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.mesh import ParallelDims
from zero2all.recipe import ModelConfig, ParallelRecipe

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 4096,
}  # fmt: skip
ROWS, LENGTH = 2, 256
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "selective": ({"activation_checkpointing": "selective"}, {}),
    "full": ({"activation_checkpointing": "full"}, {}),
    "full, groups of 2": ({"activation_checkpointing": "full", "activation_checkpointing_every": 2}, {}),
    "full, groups of 4": ({"activation_checkpointing": "full", "activation_checkpointing_every": 4}, {}),
    "offload": ({"activation_offload": True}, {}),
    "offload, full": ({"activation_checkpointing": "full", "activation_offload": True}, {}),
    "residual dropout": ({}, {"residual_dropout": 0.1}),
    "attention dropout": ({}, {"attention_dropout": 0.1}),
}


def build(parallel: dict[str, Any], changes: dict[str, Any]) -> ParallelModel:
    config = ModelConfig.model_validate({**SHAPE, **changes})
    return ParallelModel(config, ParallelRecipe(**parallel), ParallelMesh(ParallelDims(), CPU), seed=0)


def seconds(model: ParallelModel, tokens: Tensor) -> float:
    return cpu_seconds(model.forward_backward, tokens[:, :-1], tokens[:, 1:], tokens.numel())


def estimated(model: ParallelModel) -> int:
    recipe, mode = model.recipe, model.recipe.activation_checkpointing
    assert mode != "budget"
    policy = ActivationPolicy(mode, recipe.activation_checkpointing_every, recipe.activation_offload)
    return activation_bytes(model.config, ROWS * LENGTH, half=False, policy=policy)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    tokens = torch.randint(0, 4096, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    models = {name: build(*options) for name, options in MODES.items()}
    times = take_turns({name: partial(seconds, model, tokens) for name, model in models.items()}, rounds, warm_up=1)
    plain = statistics.median(times["none"])
    flops = flops_per_token(models["none"].config, LENGTH)
    rows = []
    for name, model in models.items():
        mode = model.recipe.activation_checkpointing
        assert mode != "budget"
        hardware = flops.hardware(mode, every=model.recipe.activation_checkpointing_every)
        ratio = statistics.median(times[name]) / plain
        again = hardware / flops.hardware()
        rows.append((name, f"{estimated(model) / 2**20:.1f} MiB", f"{ratio:.2f}", f"{again:.2f}"))
    show(markdown_table(("mode", "formula", "time", "hardware FLOPs"), rows))
