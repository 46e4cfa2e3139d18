"""The norm of a gradient that is sharded over ranks, and clipping by it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.base.machine.devices import fp64_device
from zero2all.base.torch_private import foreach_mul_, foreach_norm
from zero2all.model import Z2all
from zero2all.parallel.mesh import ParallelMesh
from zero2all.parallel.sharded_init import to_local


def replica_count(mesh: ParallelMesh, parameter: Tensor) -> int:
    """How many ranks hold the same shard of a parameter."""
    ranks = mesh.dims.world_size // mesh.dims.pp
    if not isinstance(parameter, DTensor):
        return ranks
    shards = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return ranks // math.prod(size for size, placement in shards if not placement.is_replicate())


class GradientNorms:
    """The norm over the parameters of all ranks. A shard that several ranks hold counts once."""

    def __init__(self, model: Z2all, mesh: ParallelMesh) -> None:
        self._model, self._mesh = model, mesh
        self.by_layer = torch.zeros(0)
        """The norm of each decoder layer before clipping; embeddings and head are in none."""
        # Made once: a copy to the device is a host sync.
        self._replica_counts: dict[tuple[int, ...], Tensor] = {}
        self._layer_numbers: dict[tuple[int, ...], Tensor] = {}

    def clip_(self, max_norm: float, loss_scale: float) -> Tensor:
        """Scale the gradient so that its norm is at most ``max_norm``; the old norm. One all-reduce, whatever the
        parallel layout. Gradients are ``loss_scale`` times too large before, and not after."""
        own_squares = self._local_square_norms()
        squares = torch.cat([own_squares.sum()[None], self._sum_by_layer(own_squares)])
        if self._mesh.dims.world_size > 1:
            dist.all_reduce(squares)
        self.by_layer = squares[1:].sqrt() / loss_scale
        norm = squares[0].sqrt().float() / loss_scale
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / loss_scale
        gradients = [to_local(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]
        foreach_mul_(gradients, factor.to(gradients[0].device))  # which may be the host's
        return norm

    def _sum_by_layer(self, own_squares: Tensor) -> Tensor:
        count = self._model.config.num_hidden_layers
        names = [name for name, parameter in self._model.named_parameters() if parameter.grad is not None]
        layers = tuple(int(name.split(".")[1]) if name.startswith("layers.") else count for name in names)
        if layers not in self._layer_numbers:
            self._layer_numbers[layers] = torch.tensor(layers, device=own_squares.device)
        squares = own_squares.new_zeros(count + 1)
        return squares.index_add_(0, self._layer_numbers[layers], own_squares)[:-1]

    def _local_square_norms(self) -> Tensor:
        """Squared norm of this rank's gradient of each parameter that has one, divided by the ranks that hold it."""
        gradients = [
            (parameter, to_local(parameter.grad))
            for parameter in self._model.parameters()
            if parameter.grad is not None
        ]
        norms = foreach_norm([gradient for _, gradient in gradients])
        device = fp64_device(self._mesh.device)
        counts = tuple(replica_count(self._mesh, parameter) for parameter, _ in gradients)
        if counts not in self._replica_counts:
            self._replica_counts[counts] = torch.tensor(counts, device=device)
        return torch.stack(norms).to(device).double().square() / self._replica_counts[counts]
