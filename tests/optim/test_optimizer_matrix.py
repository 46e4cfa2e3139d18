"""Every optimizer of the recipe with adapters, experts, tied embeddings and frozen weights: it trains, or one rule of
the recipe says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.base.errors import RecipeError
from zero2all.base.plugins import builtin_names
from zero2all.model import Z2all
from zero2all.model.cost.model_size import weight_dtype
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.recipe import ModelConfig, OptimizerRecipe, parse_recipe
from zero2all.train import Run, train

OPTIMIZERS = builtin_names("optimizer")
SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "adapters": {"lora": {"rank": 4}},
    "adapters of attention, tied": {"lora": {"rank": 2, "target_modules": ["q_proj"]}, "tie_word_embeddings": True},
    "experts": {"moe": EXPERTS},
    "experts with adapters": {"moe": EXPERTS, "lora": {"rank": 2, "target_modules": ["q_proj", "o_proj"]}},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "only the head": {"tie_word_embeddings": False},
    "only matrices": {},
    "only norms": {},
}


def freeze(model: Z2all, case: str) -> None:
    keep = {"only the head": "lm_head", "only matrices": "proj", "only norms": "norm"}.get(case)
    if keep is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(keep in name)


def recipe_problem(optimizer: str, options: dict[str, Any]) -> str | None:
    model = {"vocab_size": 8192, **{key: value for key, value in {**SHAPE, **options}.items() if key != "vocab_size"}}
    text = f"model: {model}\ntrain: {{steps: 2, seq_len: 16, init: /weights, optimizer: {{name: {optimizer}}}}}"
    try:
        parse_recipe(text.replace("True", "true").replace("False", "false"), [])
    except RecipeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_steps_or_one_rule(name: str, case: str) -> None:
    if (problem := recipe_problem(name, MODELS[case])) is not None:
        assert problem.count("\n") == 1, "one mistake, one line"
        return
    if name == "adamw-8bit":
        pytest.importorskip("torchao", reason="adamw-8bit needs torchao")
    options = OptimizerRecipe(name=name, lr=1e-2, muon_lr=1e-2)
    model = Z2all(ModelConfig(**SHAPE, **MODELS[case])).init_weights(seed=0)
    for parameter_name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weight_dtype(options, parameter_name))
    freeze(model, case)
    trained = {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}
    frozen = {key: value.detach().clone() for key, value in model.named_parameters() if not value.requires_grad}
    optimizers = build_optimizers(model, options)
    assert sum(len(group["params"]) for one in optimizers for group in one.param_groups) == len(trained)
    tokens = torch.arange(32).view(2, 16) % 120
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=options.has_bf16_weights):
            loss = model(tokens, tokens.roll(-1, 1)).mean()
        loss.backward()
        set_learning_rate(optimizers, options, 1.0)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its update, which takes minutes
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[key], value) for key, value in frozen.items())
    moved = [key for key, value in trained.items() if not torch.equal(after[key], value)]
    assert len(moved) >= len(trained) // 2, sorted(set(trained) - set(moved))


def test_muon_trains_adapters_and_resumes(workspace: Path, tmp_path: Path) -> None:
    base = tiny_recipe(workspace, f"out={tmp_path / 'base'}", "train.steps=1")
    train(base)
    options = [
        f"out={tmp_path / 'lora'}", f"train.init={base.run_dir}", "model.lora={rank: 4}",
        "train.optimizer={name: muon, lr: 1e-3, muon_lr: 0.02}", "train.schedule.shape=constant",
    ]  # fmt: skip
    train(tiny_recipe(workspace, *options, "train.steps=2"))
    assert train(tiny_recipe(workspace, *options, "train.steps=3")).resumed_at == 2
    weights = Run.open(tmp_path / "lora").load_model().state_dict()
    assert all(weights[name].abs().max() > 0 for name in weights if name.endswith("lora_B"))
