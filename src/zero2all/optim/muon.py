"""Muon (https://kellerjordan.github.io/posts/muon/): momentum, orthogonalized matrix by matrix.

torch.optim.Muon takes single matrices only. This one also takes the stacked matrices of experts, and on a mesh divides
the matrices over the ranks (``MatrixExchange``), where DTensor products would communicate in each of five iterations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero2all.base.torch_private import local_shape_and_offset_at
from zero2all.parallel.sharded_init import to_local

Coordinate = tuple[int, ...]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
NORM_EPS = 1e-7


class MatrixPiece(NamedTuple):
    """The part of a matrix in the shard of one rank."""

    local_index: int
    """Which of the stacked matrices of the shard; 0 for a single matrix."""
    rows: range
    columns: range

    @property
    def numel(self) -> int:
        return len(self.rows) * len(self.columns)

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


@dataclass
class Matrix:
    """One matrix of a parameter: the parameter itself, or one of its experts."""

    parameter: int
    shape: tuple[int, int]
    pieces: dict[Coordinate, MatrixPiece]
    """Pieces by the coordinate of the rank along the sharded dimensions; ranks without a part of it have none."""
    owner: Coordinate = ()
    """The rank that orthogonalizes it, along the sharded dimensions."""
    owner_replica: Coordinate = ()
    """The same along the replicated dimensions."""

    @property
    def cost(self) -> int:
        """Proportional to the FLOPs of an iteration."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)


class PieceKey(NamedTuple):
    """A piece: index of its matrix, and the rank whose shard has it."""

    matrix: int
    origin: Coordinate


@dataclass(frozen=True)
class Hop:
    """What one rank sends and receives in one all-to-all along a mesh dimension, in the order of the buffers."""

    sent: list[PieceKey]
    sent_sizes: list[int]
    """Elements of each piece."""
    send_splits: list[int]
    """Elements for each rank of the dimension."""
    received: list[PieceKey]
    received_sizes: list[int]
    receive_splits: list[int]

    def back(self) -> Hop:
        """The same pieces in the other direction."""
        return Hop(
            self.received, self.received_sizes, self.receive_splits, self.sent, self.sent_sizes, self.send_splits
        )


class MatrixExchange:
    """Which rank orthogonalizes which matrix of sharded parameters, and how the shards get there and back.

    The plan is for parameters on one mesh with the same replicated dimensions, and every rank computes the same one.
    Each matrix has one owner; the work is divided over all ranks of the mesh. Along a sharded mesh dimension one
    all-to-all brings the shards to their owners and one returns the results, each rank holding only the matrices that
    it owns. Along a replicated dimension one all-gather gives every replica the results of the others. A matrix that a
    rank holds in full, as experts, stays there.

    Plain tensors are replicated over ``replicas`` (DDP), or held by this process alone.
    """

    def __init__(self, parameters: Sequence[Tensor], replicas: dist.ProcessGroup | None = None) -> None:
        first = parameters[0]
        self._shard_groups: list[dist.ProcessGroup] = []
        self._replica_groups: list[dist.ProcessGroup] = []
        self._shard_dims: list[int] = []
        if not isinstance(first, DTensor):
            self._replica_groups += [] if replicas is None else [replicas]
        else:
            for dim, placement in enumerate(first.placements):
                if first.device_mesh.size(dim) > 1:
                    groups = self._replica_groups if placement.is_replicate() else self._shard_groups
                    groups.append(first.device_mesh.get_group(dim))
                    if not placement.is_replicate():
                        self._shard_dims.append(dim)
        self._own: Coordinate = tuple(group.rank() for group in self._shard_groups)
        self._own_replica: Coordinate = tuple(group.rank() for group in self._replica_groups)
        self.matrices = [
            matrix for index, parameter in enumerate(parameters) for matrix in self._matrices_of(index, parameter)
        ]
        self._assign_owners()
        self._hops = [self._plan_hop(dim) for dim in range(len(self._shard_groups))]

    @property
    def communicates(self) -> bool:
        """Whether other ranks are needed: not if each holds full matrices, and no one else the same."""
        return bool(self._replica_groups) or any(hop is not None for hop in self._hops)

    @torch.no_grad()
    def orthogonalize(
        self, updates: Sequence[Tensor], newton_schulz: Callable[[Tensor], Tensor]
    ) -> Iterable[tuple[int, int, Tensor]]:
        """Orthogonalize this rank's shards of ``updates``, stacks [matrices, rows, columns].

        Returns the shards of the results: parameter, index in its stack, and the matrix.
        """
        held = {
            PieceKey(number, self._own): updates[matrix.parameter][matrix.pieces[self._own].local_index]
            for number, matrix in enumerate(self.matrices)
            if self._own in matrix.pieces and matrix.owner_replica == self._own_replica
        }
        empty = updates[0].new_empty(0)  # a rank with nothing to send takes part all the same
        hops = [(hop, group) for hop, group in zip(self._hops, self._shard_groups, strict=True) if hop is not None]
        for hop, group in hops:
            _all_to_all(held, hop, group, empty)
        self._orthogonalize_own(held, newton_schulz)
        for hop, group in reversed(hops):
            _all_to_all(held, hop.back(), group, empty)
        for dim in range(len(self._replica_groups)):
            self._all_gather(held, dim, empty)
        for key, part in held.items():
            matrix = self.matrices[key.matrix]
            piece = matrix.pieces[self._own]
            yield matrix.parameter, piece.local_index, part.reshape(len(piece.rows), len(piece.columns))

    def _matrices_of(self, index: int, parameter: Tensor) -> list[Matrix]:
        """The matrices of a parameter with the pieces that ranks hold of them."""
        count = parameter.shape[0] if parameter.ndim == 3 else 1
        rows, columns = parameter.shape[-2:]
        matrices = [Matrix(index, (rows, columns), {}) for _ in range(count)]
        for coordinate in itertools.product(*(range(group.size()) for group in self._shard_groups)):
            shape, offset = self._shard_at(parameter, coordinate)
            held_rows, held_columns = (range(o, o + s) for o, s in zip(offset[-2:], shape[-2:], strict=True))
            experts = range(offset[0], offset[0] + shape[0]) if parameter.ndim == 3 else range(1)
            if shape[-2] * shape[-1] > 0:
                for local_index, expert in enumerate(experts):
                    matrices[expert].pieces[coordinate] = MatrixPiece(local_index, held_rows, held_columns)
        return matrices

    def _shard_at(self, parameter: Tensor, coordinate: Coordinate) -> tuple[Sequence[int], Sequence[int]]:
        """Shape and first index of the shard of a rank."""
        if not isinstance(parameter, DTensor):
            return parameter.shape, [0] * parameter.ndim
        on_mesh = [0] * parameter.device_mesh.ndim
        for dim, place in zip(self._shard_dims, coordinate, strict=True):
            on_mesh[dim] = place
        mesh_shape = parameter.device_mesh.shape
        return local_shape_and_offset_at(parameter.shape, mesh_shape, on_mesh, parameter.placements)

    def _assign_owners(self) -> None:
        """The largest matrix first, each to the rank with the least work so far."""
        replicas = list(itertools.product(*(range(group.size()) for group in self._replica_groups)))
        shards = list(itertools.product(*(range(group.size()) for group in self._shard_groups)))
        work = dict.fromkeys(itertools.product(replicas, shards), 0)
        for matrix in sorted(self.matrices, key=lambda matrix: -matrix.cost):
            holders = shards if len(matrix.pieces) > 1 else list(matrix.pieces)
            replica, owner = min(itertools.product(replicas, holders), key=work.__getitem__)
            work[replica, owner] += matrix.cost
            matrix.owner, matrix.owner_replica = owner, replica

    def _plan_hop(self, dim: int) -> Hop | None:
        """The all-to-all along a sharded dimension: each piece moves to its owner's coordinate there."""
        size = self._shard_groups[dim].size()
        sent: list[list[PieceKey]] = [[] for _ in range(size)]
        received: list[list[PieceKey]] = [[] for _ in range(size)]
        is_needed = False
        for number, matrix in enumerate(self.matrices):
            if matrix.owner_replica != self._own_replica:
                continue
            for origin in matrix.pieces:
                before = (*matrix.owner[:dim], *origin[dim:])
                after = (*matrix.owner[: dim + 1], *origin[dim + 1 :])
                if before == after:
                    continue
                is_needed = True
                if before == self._own:
                    sent[after[dim]].append(PieceKey(number, origin))
                elif after == self._own:
                    received[before[dim]].append(PieceKey(number, origin))
        if not is_needed:
            return None
        return Hop(*self._sizes(sent), *self._sizes(received))

    def _sizes(self, by_peer: list[list[PieceKey]]) -> tuple[list[PieceKey], list[int], list[int]]:
        keys = [key for keys in by_peer for key in keys]
        numel = {key: self.matrices[key.matrix].pieces[key.origin].numel for key in keys}
        return keys, [numel[key] for key in keys], [sum(numel[key] for key in peer) for peer in by_peer]

    def _orthogonalize_own(self, held: dict[PieceKey, Tensor], newton_schulz: Callable[[Tensor], Tensor]) -> None:
        """Replace the pieces of the matrices of this rank by pieces of the results, parameter by parameter."""
        by_parameter: dict[int, list[int]] = {}
        for number, matrix in enumerate(self.matrices):
            if (matrix.owner_replica, matrix.owner) == (self._own_replica, self._own):
                by_parameter.setdefault(matrix.parameter, []).append(number)
        for numbers in by_parameter.values():
            full = [self._assemble(held, number) for number in numbers]
            # One matrix is not a batch of one: it is rounded as in one process, where it is a matrix.
            results = newton_schulz(full[0])[None] if len(full) == 1 else newton_schulz(torch.stack(full))
            for number, result in zip(numbers, results, strict=True):
                for origin, piece in self.matrices[number].pieces.items():
                    held[PieceKey(number, origin)] = piece.of(result)

    def _assemble(self, held: dict[PieceKey, Tensor], number: int) -> Tensor:
        matrix = self.matrices[number]
        parts = {origin: held.pop(PieceKey(number, origin)) for origin in matrix.pieces}
        if len(parts) == 1:
            return next(iter(parts.values()))
        full = next(iter(parts.values())).new_empty(matrix.shape)
        for origin, part in parts.items():
            place = matrix.pieces[origin].of(full)
            place.copy_(part.view_as(place))
        return full

    def _all_gather(self, held: dict[PieceKey, Tensor], dim: int, empty: Tensor) -> None:
        """Give every replica along a dimension the shards that the others have orthogonalized."""
        group = self._replica_groups[dim]
        later = slice(dim + 1, None)
        by_replica: list[list[PieceKey]] = [[] for _ in range(group.size())]
        for number, matrix in enumerate(self.matrices):
            if self._own in matrix.pieces and matrix.owner_replica[later] == self._own_replica[later]:
                by_replica[matrix.owner_replica[dim]].append(PieceKey(number, self._own))
        sizes = [[self.matrices[key.matrix].pieces[self._own].numel for key in keys] for keys in by_replica]
        longest = max(map(sum, sizes))
        own = torch.cat([empty, *(held[key].flatten() for key in by_replica[group.rank()])])
        gathered = empty.new_empty(group.size(), longest)
        dist.all_gather_single(gathered.view(-1), F.pad(own, (0, longest - len(own))), group=group)
        for keys, own_sizes, row in zip(by_replica, sizes, gathered, strict=True):
            held.update(zip(keys, torch.split(row[: sum(own_sizes)], own_sizes), strict=True))


def _all_to_all(held: dict[PieceKey, Tensor], hop: Hop, group: dist.ProcessGroup, empty: Tensor) -> None:
    sent = torch.cat([empty, *(held.pop(key).flatten() for key in hop.sent)])
    received = empty.new_empty(sum(hop.receive_splits))
    dist.all_to_all_single(received, sent, hop.receive_splits, hop.send_splits, group=group)
    held.update(zip(hop.received, torch.split(received, hop.received_sizes), strict=True))


class Muon(Optimizer):
    """For matrices [rows, columns] and stacks of them [experts, rows, columns], each expert separately.

    The iteration, and what ranks send each other, is in ``dtype``. ``replicas`` are the ranks that hold the same
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
        """The update of this rank's shard, in the dtype of the iteration."""
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
