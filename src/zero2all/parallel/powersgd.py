"""PowerSGD: replicas exchange a low-rank approximation of the gradient (https://arxiv.org/abs/1905.13727).

A matrix M is sent as P Q^T with as few columns as the rank. What the approximation leaves out is added to the next
gradient (error feedback), and Q is where the next step starts, so that the approximation follows the gradient. Every
replica computes the same P and Q from the same sums: their weights stay bitwise equal on devices of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2all.model.z2all import derive_seed

SMALLEST_SAVING = 2.0  # times fewer numbers sent, below which a matrix is sent as it is


@dataclass(frozen=True)
class _Stack:
    """Matrices of one shape, whose factors are next to each other in the buffers."""

    parameters: list[nn.Parameter]
    errors: list[Tensor]
    """[rows, columns] of each: what has not been sent yet."""
    p_KMR: Tensor
    q_KNR: Tensor
    """Views of the buffers that are all-reduced."""
    saved_q_KNR: Tensor
    """The Q of the last step with a finite gradient."""


class PowerSGD:
    """Averages the gradients of replicas in two all-reduces: plain tensors with all P, then all Q.

    >>> powersgd = PowerSGD(model, rank=4, group=group, seed=0)
    >>> loss.backward()
    >>> powersgd.average_gradients()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        group: dist.ProcessGroup,
        seed: int,
        smallest_saving: float = SMALLEST_SAVING,
    ) -> None:
        """Trained matrices are compressed where that sends ``smallest_saving`` times fewer numbers."""
        self._group, self._rank, self._seed = group, rank, seed
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        factors = {name: factor_numel(parameter.shape, rank, smallest_saving) for name, parameter in named}
        self._plain = [parameter for name, parameter in named if factors[name] is None]
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, parameter in named:
            if factors[name] is not None:
                by_shape.setdefault(_matrix_shape(parameter.shape), []).append(name)
        self._stacks = list(self._allocate(by_shape, dict(named)))
        self._names = [name for names in by_shape.values() for name in names]
        self.reset()

    def _allocate(self, by_shape: dict[tuple[int, int], list[str]], named: dict[str, nn.Parameter]) -> Iterator[_Stack]:
        device = next(iter(named.values())).device
        plain = sum(parameter.numel() for parameter in self._plain)
        ranks = {shape: min(self._rank, *shape) for shape in by_shape}
        sizes = [(len(names) * m * ranks[m, n], len(names) * n * ranks[m, n]) for (m, n), names in by_shape.items()]
        self._first = torch.zeros(plain + sum(p for p, _ in sizes), device=device)
        self._second = torch.zeros(sum(q for _, q in sizes), device=device)
        ps, qs = (
            torch.split(self._first[plain:], [p for p, _ in sizes]),
            torch.split(self._second, [q for _, q in sizes]),
        )
        for ((m, n), names), p, q in zip(by_shape.items(), ps, qs, strict=True):
            count, rank = len(names), ranks[m, n]
            yield _Stack(
                [named[name] for name in names],
                [torch.zeros(m, n, device=device) for _ in names],
                p.view(count, m, rank),
                q.view(count, n, rank),
                torch.empty(count, n, rank, device=device),
            )

    @torch.no_grad()
    def reset(self) -> None:
        """As before the first step: nothing is left to send, and Q is random, the same on every rank."""
        for number, stack in enumerate(self._stacks):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, number))
            stack.saved_q_KNR.copy_(torch.randn(stack.saved_q_KNR.shape, generator=generator))
            for error in stack.errors:
                error.zero_()

    @torch.no_grad()
    def average_gradients(self, scale: float = 1.0) -> None:
        """Replace every gradient by its approximate average over the replicas.

        ``scale`` is how many times too large gradients are now (fp16): what is left for the next step has none. A
        gradient that is not finite comes out as such, and leaves no trace in what is kept.
        """
        self._put_plain()
        # In place of gradients in fp32, which are overwritten below.
        matrices = [
            list(map(partial(_corrected, scale=scale), stack.parameters, stack.errors)) for stack in self._stacks
        ]
        for stack, own in zip(self._stacks, matrices, strict=True):
            # Of the same span: with columns of very different length P would lose the short ones.
            for matrix, q, p in zip(own, torch.linalg.qr(stack.saved_q_KNR).Q, stack.p_KMR, strict=True):
                torch.mm(matrix, q, out=p)
        self._all_reduce(self._first)
        # The same on every rank, whichever of them had it: no exchange of its own.
        is_finite = self._first.isfinite().all()
        self._take_plain()
        for stack, own in zip(self._stacks, matrices, strict=True):
            stack.p_KMR.copy_(torch.linalg.qr(stack.p_KMR).Q)
            for matrix, q, p in zip(own, stack.q_KNR, stack.p_KMR, strict=True):
                torch.mm(matrix.T, p, out=q)
        self._all_reduce(self._second)
        for stack, own in zip(self._stacks, matrices, strict=True):
            stack.saved_q_KNR.copy_(torch.where(is_finite, stack.q_KNR, stack.saved_q_KNR))
            factors = zip(stack.parameters, stack.errors, own, stack.p_KMR, stack.q_KNR, strict=True)
            for parameter, error, matrix, p, q in factors:
                sent = p @ q.T
                error.copy_(torch.where(is_finite, (matrix - sent) / scale, error))
                assert parameter.grad is not None
                parameter.grad.copy_(torch.where(is_finite, sent, torch.nan).view_as(parameter))

    def _put_plain(self) -> None:
        parameters = [parameter for stack in self._stacks for parameter in stack.parameters] + self._plain
        for parameter in parameters:
            if parameter.grad is None:  # an expert without a token: other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        if self._plain:
            torch.cat([_gradient(parameter).flatten() for parameter in self._plain], out=self._plain_part)

    def _take_plain(self) -> None:
        if self._plain:
            parts = torch.split(self._plain_part, [parameter.numel() for parameter in self._plain])
            for parameter, part in zip(self._plain, parts, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter))

    @property
    def _plain_part(self) -> Tensor:
        return self._first[: sum(parameter.numel() for parameter in self._plain)]

    def _all_reduce(self, buffer: Tensor) -> None:
        if buffer.numel():
            dist.all_reduce(buffer, group=self._group)
            buffer /= self._group.size()

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs, as live tensors: the error of this rank, and Q, the same on every rank."""
        rank = self._group.rank()
        errors = [error for stack in self._stacks for error in stack.errors]
        qs = [q for stack in self._stacks for q in stack.saved_q_KNR]
        named = zip(self._names, errors, qs, strict=True)
        return {
            key: tensor
            for name, error, q in named
            for key, tensor in ((f"error-{rank}.{name}", error), (f"q.{name}", q))
        }

    @property
    def sent_numel(self) -> int:
        """Numbers in the all-reduces of a step, in fp32."""
        return self._first.numel() + self._second.numel()

    @torch.no_grad()
    def error_norm(self) -> Tensor:
        """Norm of what this rank has not sent yet, in units of the gradient."""
        squares = [error.square().sum() for stack in self._stacks for error in stack.errors]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def factor_numel(shape: Sequence[int], rank: int, smallest_saving: float = SMALLEST_SAVING) -> int | None:
    """Numbers in P and Q of a parameter; None if it is sent as it is.

    >>> factor_numel((1024, 4096), rank=4), factor_numel((1024,), rank=4)
    (20480, None)
    """
    rows, columns = _matrix_shape(shape)
    numel = min(rank, rows, columns) * (rows + columns)
    return numel if smallest_saving * numel < rows * columns else None


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """As a matrix: stacked ones, such as those of experts, are one below the other. A vector is one row."""
    return math.prod(shape[:-1]), shape[-1]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.float()


def _corrected(parameter: nn.Parameter, error: Tensor, scale: float) -> Tensor:
    """The gradient with what was left out before."""
    return _gradient(parameter).reshape(error.shape).add_(error, alpha=scale)


def broadcast_weights(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Those of the first rank to all: random numbers of different GPUs may differ."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group_src=0, group=group)
