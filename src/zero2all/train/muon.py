"""Muon (https://kellerjordan.github.io/posts/muon/): momentum, orthogonalized matrix by matrix.

torch.optim.Muon takes single matrices only. This one also takes the stacked matrices of experts, and on a mesh gathers
a matrix once for all five iterations, where DTensor products would communicate in each of them.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
NORM_EPS = 1e-7


class Muon(Optimizer):
    """For matrices [rows, columns] and stacks of them [experts, rows, columns], each expert separately."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(buffer, group["momentum"]))  # Nesterov
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalize(update: Tensor) -> Tensor:
    """Newton-Schulz over full matrices, in bf16; on a mesh the result is sharded like the update."""
    if not isinstance(update, DTensor):
        return newton_schulz(update)
    half = cast(DTensor, update.bfloat16())
    # A rank needs full matrices, but only of its own experts.
    matrix_placements = [_matrix_placement(placement, update.ndim) for placement in half.placements]
    matrices = half.redistribute(placements=matrix_placements).to_local()
    orthogonalized = DTensor.from_local(
        newton_schulz(matrices),
        half.device_mesh,
        matrix_placements,
        run_check=False,
        shape=half.shape,
        stride=half.stride(),
    )
    return orthogonalized.redistribute(placements=half.placements)


def _matrix_placement(placement: Placement, dimensions: int) -> Placement:
    return placement if dimensions == 3 and type(placement) is Shard and placement.dim == 0 else Replicate()


def newton_schulz(matrices: Tensor) -> Tensor:
    """Bring the singular values near 1; exactly 1 would cost iterations and gain nothing."""
    a, b, c = COEFFICIENTS
    add_product = torch.baddbmm if matrices.ndim == 3 else torch.addmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    # The spectral norm is at most the Frobenius norm. Experts without tokens have zero gradients, which stay zero.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=NORM_EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
