"""Muon (https://kellerjordan.github.io/posts/muon/): momentum, orthogonalized matrix by matrix.

torch.optim.Muon takes single matrices only. This one also takes the stacked matrices of experts, and on a mesh divides
the matrices over the ranks (``MatrixExchange``), where DTensor products would communicate in each of five iterations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero2all.parallel.sharded_init import to_local
from zero2all.train.muon_exchange import MatrixExchange

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
NORM_EPS = 1e-7


class Muon(Optimizer):
    """For matrices [rows, columns] and stacks of them [experts, rows, columns], each expert separately.

    ``dtype`` is that of the iteration, and of what ranks send each other. ``replicas`` are the ranks that hold the same
    plain tensors (DDP): they divide the work. Parameters that are DTensors know their ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        dtype: torch.dtype = torch.bfloat16,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype, self.replicas = dtype, replicas
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Almost always one layout; parameters that are replicated along other mesh dimensions have another.
            by_layout: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_layout.setdefault(_layout(parameter), []).append(parameter)
            for parameters in by_layout.values():
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        exchange = self._exchange_of(parameters)
        if not exchange.communicates:  # one by one: no memory for the updates of all
            for parameter in parameters:
                self._apply(
                    parameter, to_local(parameter), newton_schulz(self._momentum_update(parameter, group)), group
                )
            return
        updates = [_as_stack(self._momentum_update(parameter, group)) for parameter in parameters]
        stacks = [_as_stack(to_local(parameter)) for parameter in parameters]
        for index, matrix, result in exchange.orthogonalize(updates, newton_schulz):
            self._apply(parameters[index], stacks[index][matrix], result, group)

    def _exchange_of(self, parameters: list[Tensor]) -> MatrixExchange:
        key = tuple(map(id, parameters))
        if key not in self._exchanges:
            self._exchanges[key] = MatrixExchange(parameters, self.replicas)
        return self._exchanges[key]

    def _momentum_update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Of this rank's shard, in the dtype of the iteration."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = to_local(parameter.grad)
        buffer = to_local(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]).to(self.dtype)  # Nesterov

    @staticmethod
    def _apply(parameter: Tensor, shard: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """To the shard of a parameter, or of one of its matrices."""
        rows, columns = parameter.shape[-2:]
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def _as_stack(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor[None]


def _layout(parameter: Tensor) -> Any:
    """Its mesh, and along which dimensions it is replicated."""
    if not isinstance(parameter, DTensor):
        return None
    return parameter.device_mesh, tuple(placement.is_replicate() for placement in parameter.placements)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Bring the singular values near 1; exactly 1 would cost iterations and gain nothing."""
    a, b, c = COEFFICIENTS
    add_product = torch.baddbmm if matrices.ndim == 3 else torch.addmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The spectral norm is at most the Frobenius norm. Experts without tokens have zero gradients, which stay zero.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=NORM_EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
