"""AdamW with the right groups."""

from __future__ import annotations

import torch
from torch import nn

from zero2all.recipe import OptimizerRecipe


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Decay pulls matrices towards zero; on a norm's scale or a bias it would only hurt."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
