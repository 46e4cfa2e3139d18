"""What DPO, KTO, GRPO and distillation add to a plan, beside what the trainer allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero2all.base.errors import UsageError
from zero2all.base.machine.gpu_specs import GPUS
from zero2all.model import Z2all
from zero2all.model.cost.describe import with_precision_of
from zero2all.model.kv_cache import KVCache
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import CostPlan, plan_run
from zero2all.planner.post_training import plan_rollouts
from zero2all.planner.workload import Layout, Workload, largest_stage
from zero2all.recipe import Recipe, parse_recipe
from zero2all.train.hyperparameters import fill_hyperparameters

BASE = """
model: {preset: z2all-300m, vocab_size: 32768}
tokenizer: {vocab_size: 32768}
train: {steps: 100, seq_len: 2048, batch_tokens: 64Ki, micro_batch_tokens: 8Ki, init: /weights, optimizer: {lr: 1e-5}}
"""
GRPO = ["train.objective={name: grpo, max_answer_tokens: 512, grpo: {rewards: [a:b], group_size: 4}}"]


def recipe_with(*overrides: str) -> Recipe:
    return fill_hyperparameters(parse_recipe(BASE, list(overrides)))


def planned(*overrides: str, gpus: int = 8, gpu: str = "H100") -> CostPlan:
    return plan_run(recipe_with(*overrides), Cluster.of(GPUS[gpu], gpus, None, None))


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_reference_takes_no_memory_of_the_gpu(name: str) -> None:
    assert planned(f"train.objective.name={name}").memory.total == planned().memory.total


def test_the_cache_of_sampled_answers_is_that_of_the_decoder() -> None:
    sizes = ["model={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
             "num_key_value_heads: 2, max_position_embeddings: 64, vocab_size: 8192}", "tokenizer.vocab_size=8192",
             "train.seq_len=32", "train.batch_tokens=128", "train.micro_batch_tokens=64",
             "train.precision=fp32"]  # fmt: skip
    recipe = recipe_with(*sizes, *GRPO)
    stage = largest_stage(recipe)
    rollouts = plan_rollouts(Workload.of(recipe, stage), Layout.of(recipe, stage, 1))
    assert rollouts is not None
    assert (rollouts.answers, rollouts.rows, rollouts.length) == (4 * 4, 16, 32)
    model, cache = (
        Z2all(recipe.model).init_weights(seed=0),
        KVCache(rollouts.rows, rollouts.length, torch.device("cpu")),
    )
    with torch.no_grad():
        model(torch.zeros(rollouts.rows, 3, dtype=torch.int64), cache=cache)
    assert rollouts.cache == cache.nbytes


def test_grpo_counts_cache_and_time_of_its_answers() -> None:
    plain, sampling = planned(), planned(*GRPO)
    cache = sampling.memory.bytes_of("KV cache of sampled answers")
    assert cache == 16 * 2048 * 2 * 26 * 4 * 64 * 2  # answers, tokens, keys and values, layers, heads, size, bf16
    assert sampling.memory.total == plain.memory.total  # activations are larger, and come later
    assert sampling.step.sampling > 0
    assert sampling.step.expected == pytest.approx(plain.step.expected + sampling.step.sampling)
    elsewhere = planned(*GRPO, "train.objective.grpo.endpoint=http://127.0.0.1:8000/v1")
    assert (elsewhere.step.sampling, elsewhere.memory.total) == (0.0, plain.memory.total)


def test_a_teacher_is_sharded_like_the_model(tmp_path: Path) -> None:
    options = "train.objective={name: distill, distill: {teacher: %s}}"
    plain, assumed = planned(), planned(options % "/no/such/teacher")
    assert assumed.memory.bytes_of("teacher weights in bf16") == pytest.approx(2 * plain.parameters / 8, rel=1e-6)
    (tmp_path / "identity.json").write_text('{"model": {"preset": "z2all-85m", "vocab_size": 32768}}', encoding="utf-8")
    smaller = planned(options % tmp_path).memory.bytes_of("teacher weights in bf16")
    assert 0 < smaller < assumed.memory.bytes_of("teacher weights in bf16") / 2


@pytest.mark.parametrize(("gpu", "precision"), [("H100", "bf16"), ("V100", "fp16"), ("T4", "fp16"), ("A100", "bf16")])
def test_the_precision_is_that_of_the_named_gpu(gpu: str, precision: str) -> None:
    assert planned(gpu=gpu).layout["precision"] == precision
    assert with_precision_of(recipe_with(), GPUS[gpu]).train.precision == precision


def test_a_precision_that_the_gpu_does_not_have_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"V100 has no bf16, which train\.precision needs"):
        planned("train.precision=bf16", gpu="V100")
    with pytest.raises(UsageError, match=r"T4 has no bf16, which train\.optimizer\.name=adamw-bf16 needs"):
        planned("train.optimizer.name=adamw-bf16", gpu="T4")
    with pytest.raises(UsageError, match="A100 has no fp8 products"):
        planned("train.float8=rowwise", gpu="A100")
