"""Small runs and models, for tests of what comes after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import tiny_recipe
from zero2all.model import Z2all
from zero2all.recipe import ModelConfig
from zero2all.train import Run, train

WIDE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip


def train_run(workspace: Path, out: Path, *overrides: str) -> Run:
    recipe = tiny_recipe(workspace, f"out={out}", *overrides)
    train(recipe)
    return Run.open(recipe.run_dir)


def wide_model(seed: int = 1, **changes: Any) -> Z2all:
    """An untrained model with wide weights, so that every token of the context changes its logits."""
    return Z2all(ModelConfig.model_validate({**WIDE, **changes})).init_weights(seed).eval()
