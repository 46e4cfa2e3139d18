"""Weights that are not trained, and what attention with dropout keeps: formulas against real bytes."""

from __future__ import annotations

import pytest
import torch

from zero2all.base.machine.gpu_specs import GPUS
from zero2all.bench.step import BenchStep
from zero2all.model import ModelInputs
from zero2all.model.cost.activations import dropout_score_bytes
from zero2all.optim.optimizer import build_optimizers
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import plan_run
from zero2all.planner.rank_plan import plan_memory
from zero2all.planner.workload import Layout, Workload, largest_stage
from zero2all.recipe import Recipe, parse_recipe

CPU = torch.device("cpu")
BASE = """
tokenizer: {vocab_size: 512}
model: {hidden_size: 64, intermediate_size: 192, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2,
  max_position_embeddings: 256, vocab_size: 512}
train: {steps: 2, seq_len: 256, batch_tokens: 512, micro_batch_tokens: 512, precision: fp32}
"""
LORA = ["model.lora={rank: 4, target_modules: [q_proj, v_proj, down_proj]}", "train.init=pretrained"]


def _planned(recipe: Recipe, name: str) -> int:
    stage = largest_stage(recipe)
    return plan_memory(Workload.of(recipe, stage), Layout.of(recipe, stage, 1), CPU).bytes_of(name)


@pytest.mark.parametrize("overrides", [[], LORA])
def test_gradients_and_optimizer_are_those_of_trained_weights(overrides: list[str]) -> None:
    recipe = parse_recipe(BASE, overrides)
    mesh = ParallelMesh.init_distributed(recipe.parallel, CPU)
    model = ParallelModel(recipe.model, recipe.parallel, mesh, seed=0, dtype=torch.float32)
    optimizers = build_optimizers(model.model, recipe.train.optimizer, model.param_groups)
    tokens = torch.randint(0, 512, (2, 257), generator=torch.Generator().manual_seed(0))
    model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=512, micro_batch_size=2)
    gradients = sum(p.grad.nbytes for p in model.model.parameters() if p.grad is not None)
    for optimizer in optimizers:
        optimizer.step()
    states = [value for one in optimizers for state in one.state.values() for value in state.values()]
    moments = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)
    weights = sum(p.nbytes for p in model.model.parameters())
    assert _planned(recipe, "weights (stored)") == weights
    assert _planned(recipe, "gradients") == gradients
    assert _planned(recipe, "optimizer state") == moments
    assert (gradients < 0.1 * weights) == bool(overrides)


def test_ranks_send_gradients_of_adapters_alone() -> None:
    more = ["train.batch_tokens=4096", "train.micro_batch_tokens=512", "train.precision=bf16"]
    sent = []
    for overrides in (more, [*more, *LORA]):
        step = plan_run(parse_recipe(BASE, overrides), Cluster.of(GPUS["A100"], 8)).step
        sent.append({one.what: one.bytes for one in step.traffic})
    full, adapters = sent
    assert adapters["all-gather of weights"] > full["all-gather of weights"]
    assert adapters["reduce-scatter of gradients"] < 0.1 * full["reduce-scatter of gradients"]


def test_attention_with_dropout_keeps_scores_on_a_cpu() -> None:
    peaks, planned = [], []
    for dropout in (0.0, 0.1):
        recipe = parse_recipe(BASE, [f"model.attention_dropout={dropout}"])
        step = BenchStep(recipe)
        step.run()
        peaks.append(step.peak_bytes())
        planned.append(_planned(recipe, "activations"))
    pairs = 2 * 4 * 256 * 256 * 3  # samples, heads, pairs, layers
    assert planned[1] - planned[0] == 12 * pairs
    assert peaks[1] - peaks[0] == pytest.approx(12 * pairs, rel=0.1)


def test_gpu_kernels_keep_no_scores() -> None:
    config = parse_recipe(BASE, ["model.attention_dropout=0.1"]).model
    assert dropout_score_bytes(config, 256, torch.device("cuda")) == 0


def test_the_reference_kernel_has_dropout_too() -> None:
    step = BenchStep(parse_recipe(BASE, ["model.attention_dropout=0.1", "model.ops.attention=reference"]))
    assert step.run() > 0
