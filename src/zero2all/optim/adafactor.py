"""Adafactor (https://arxiv.org/abs/1804.04235): the second moment of a matrix as the means of its rows and columns.

Without first moment, and with the learning rate of AdamW: no steps relative to the size of a parameter, so that rates,
weight decay and muP mean what they mean for AdamW. An update is clipped to a root mean square of 1, and the decay rate
of the second moment is 1 - step^-0.8, both as in the paper.

torch.optim.Adafactor reads three numbers of every parameter on the host, and its relative steps limit the rate of a
schedule to 1 / sqrt(step). This one has no host sync, and on a mesh three all-reduces for each parameter group and mesh
dimension. Each expert of a stack is a matrix by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from zero2all.parallel.sharded_init import to_local

DECAY_POWER = 0.8
MAX_RMS = 1.0  # of an update
EPS = 1e-30  # added to squared gradients
Groups = tuple[dist.ProcessGroup, ...]


class Adafactor(Optimizer):
    """For vectors, matrices [rows, columns] and stacks of them [experts, rows, columns], plain or sharded."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parts = [self._part(parameter) for parameter in group["params"] if parameter.grad is not None]
            matrices = [part for part in parts if part.parameter.dim() > 1]
            row_squares = [part.squares(-1) for part in matrices]
            column_squares = [part.squares(-2) for part in matrices]
            _sum_over_ranks(
                [
                    *((squares, part.groups(-1)) for part, squares in zip(matrices, row_squares, strict=True)),
                    *((squares, part.groups(-2)) for part, squares in zip(matrices, column_squares, strict=True)),
                ]
            )
            for part, rows, columns in zip(matrices, row_squares, column_squares, strict=True):
                part.move(part.rows, rows / part.parameter.shape[-1])
                part.move(part.columns, columns / part.parameter.shape[-2])
            means = [part.rows.sum(-1) / part.parameter.shape[-2] for part in matrices]
            _sum_over_ranks((mean, part.groups(-2)) for part, mean in zip(matrices, means, strict=True))
            for part, mean in zip(matrices, means, strict=True):
                part.mean = mean
            for part in parts:
                if part.parameter.dim() < 2:
                    part.move(part.rows, part.gradient.square())
            # Computed twice, here and below: the updates of all parameters would be another copy of the model.
            norms = [part.update().square().sum(part.matrix_dims) for part in parts]
            _sum_over_ranks((norm, part.groups(*part.matrix_dims)) for part, norm in zip(parts, norms, strict=True))
            for part, norm in zip(parts, norms, strict=True):
                part.apply(norm, group["lr"], group["weight_decay"])

    def _part(self, parameter: Tensor) -> _Part:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU, so that reading it is no host sync
            if parameter.dim() < 2:
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            else:
                state["row_var"] = _zeros_without(parameter, parameter.dim() - 1)
                state["col_var"] = _zeros_without(parameter, parameter.dim() - 2)
        state["step"] += 1
        rows, columns = state.get("row_var"), state.get("col_var")
        return _Part(
            parameter,
            to_local(parameter.grad),
            to_local(state["exp_avg_sq"] if rows is None else rows),
            to_local(parameter.grad if columns is None else columns),
            int(state["step"]) ** -DECAY_POWER,
        )


@dataclass
class _Part:
    """What this rank holds of a parameter, in a step."""

    parameter: Tensor
    gradient: Tensor
    rows: Tensor
    """Second moment by row; for a vector, by element."""
    columns: Tensor
    """Second moment by column; not used for a vector."""
    rate: float
    """How much of the second moment is new."""
    mean: Tensor | None = None
    """The mean of the second moments of all rows; None for a vector."""

    @property
    def matrix_dims(self) -> tuple[int, ...]:
        return (-2, -1) if self.parameter.dim() > 1 else (-1,)

    def squares(self, dim: int) -> Tensor:
        """Sums over a dimension of this rank's squared gradients."""
        norms: Tensor = torch.linalg.vector_norm(self.gradient, dim=dim)
        return norms.square_()

    def groups(self, *dims: int) -> Groups:
        """The ranks that share these dimensions."""
        if not isinstance(self.parameter, DTensor):
            return ()
        mesh, count = self.parameter.device_mesh, self.parameter.dim()
        wanted = {dim % count for dim in dims}
        return tuple(
            mesh.get_group(number)
            for number, placement in enumerate(self.parameter.placements)
            if not placement.is_replicate() and placement.dim in wanted  # type: ignore[attr-defined]
        )

    def move(self, moment: Tensor, squares: Tensor) -> None:
        moment.lerp_(squares + EPS, self.rate)

    def update(self) -> Tensor:
        """Before it is clipped."""
        if self.mean is None:
            return self.gradient * self.rows.rsqrt()
        rows = (self.rows / self.mean[..., None]).rsqrt_()
        return self.gradient * rows[..., None] * self.columns.rsqrt()[..., None, :]

    def apply(self, norm: Tensor, lr: float, weight_decay: float) -> None:
        count = torch.Size(self.parameter.shape[dim] for dim in self.matrix_dims).numel()
        scale = lr / ((norm / count).sqrt() / MAX_RMS).clamp(min=1.0)
        shard = to_local(self.parameter.detach())
        shard.mul_(1 - lr * weight_decay).sub_(self.update() * scale.view(*scale.shape, *(1 for _ in self.matrix_dims)))


def _zeros_without(parameter: Tensor, dropped: int) -> Tensor:
    """Zeros of the shape and shards of a parameter without one of its dimensions."""
    shape = [size for dim, size in enumerate(parameter.shape) if dim != dropped]
    local = to_local(parameter.detach())
    zeros = local.new_zeros([size for dim, size in enumerate(local.shape) if dim != dropped])
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [_without(placement, dropped) for placement in parameter.placements]
    stride = [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def _without(placement: Any, dropped: int) -> Any:
    """How a tensor is placed without a dimension that its parameter has."""
    if placement.is_replicate() or placement.dim < dropped:
        return placement
    return Replicate() if placement.dim == dropped else Shard(placement.dim - 1)


def _sum_over_ranks(tensors: Iterable[tuple[Tensor, Groups]]) -> None:
    """Sum each over its groups of ranks, in place: one all-reduce for each group."""
    by_group: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for tensor, groups in tensors:
        for group in groups:
            by_group[group].append(tensor)
    for group, members in by_group.items():
        total = torch.cat([tensor.flatten() for tensor in members])
        dist.all_reduce(total, group=group)
        sums = torch.split(total, [tensor.numel() for tensor in members])
        for tensor, part in zip(members, sums, strict=True):
            tensor.copy_(part.view_as(tensor))
