"""Lion (https://arxiv.org/abs/2302.06675)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """The sign of an interpolated momentum (https://arxiv.org/abs/2302.06675): half of Adam's memory."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                direction = momentum.lerp(parameter.grad, 1 - fast).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - slow)
