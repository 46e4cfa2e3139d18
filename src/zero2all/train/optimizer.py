"""Optimizers and their groups."""

from __future__ import annotations

import torch
from torch import nn

from zero2all.recipe import OptimizerRecipe


def build_optimizers(model: nn.Module, recipe: OptimizerRecipe) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the matrices inside the blocks and AdamW for the rest.

    Decay pulls matrices towards zero; on a norm's scale or a bias it would only hurt.
    """
    named = list(model.named_parameters())
    in_blocks = [parameter for name, parameter in named if name.startswith("layers.") and parameter.dim() == 2]
    by_muon = {id(parameter) for parameter in in_blocks} if recipe.name == "muon" else set()
    rest = [parameter for _, parameter in named if id(parameter) not in by_muon]
    groups = [{"params": [p for p in rest if p.dim() >= 2]}, {"params": [p for p in rest if p.dim() < 2]}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, fused=True)]
    if by_muon:
        optimizers.append(torch.optim.Muon(in_blocks))
    apply_settings(optimizers, recipe)
    return optimizers


def apply_settings(optimizers: list[torch.optim.Optimizer], recipe: OptimizerRecipe) -> None:
    """Put the recipe's settings into every group: a checkpoint brings back those that it was saved with."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if isinstance(optimizer, torch.optim.Muon):
                group |= {"weight_decay": recipe.weight_decay, "momentum": recipe.muon_momentum}
            else:
                decay = recipe.weight_decay if number == 0 else 0.0
                group |= {"betas": recipe.betas, "eps": recipe.eps, "weight_decay": decay}


def set_learning_rate(optimizers: list[torch.optim.Optimizer], recipe: OptimizerRecipe, share: float) -> None:
    """Every group at the same share of its own peak."""
    for optimizer in optimizers:
        peak = recipe.muon_lr if isinstance(optimizer, torch.optim.Muon) else recipe.lr
        for group in optimizer.param_groups:
            group["lr"] = peak * share
