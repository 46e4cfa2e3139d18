"""Initialize a sharded model with the weights of the full model, random or stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zero2all.base.torch_private import local_shape_and_offset
from zero2all.model.weights import whole_tensor


class ShardedInitMode(TorchFunctionMode):
    """Inside it, filling a DTensor fills the full tensor and keeps this rank's shard. Both in fp32: weights that are
    stored in bf16 begin as those in fp32, rounded.

    A model's ``init_weights`` draws each parameter from (seed, its name). Under this mode it runs unchanged on a
    sharded model: one full parameter in memory at a time, no communication, the same weights in every layout.
    """

    INIT_FUNCTIONS = (Tensor.normal_, Tensor.fill_, Tensor.zero_)

    def __init__(self, device: torch.device | None = None) -> None:
        """``device`` draws the numbers, where shards are elsewhere (offload): another device would draw others."""
        super().__init__()
        self._device = device
        self._pending: tuple[DTensor, Tensor] | None = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], DTensor):
            if function in self.INIT_FUNCTIONS:
                full = self._full_tensor(args[0])
                function(full, *args[1:], **(kwargs or {}))
                return args[0]
            if function is Tensor.unbind:  # initialized slice by slice, as experts are
                return self._full_tensor(args[0]).unbind(*args[1:], **(kwargs or {}))
        elif function is Tensor.normal_ and args[0].dtype != torch.float32:
            return args[0].copy_(function(torch.empty_like(args[0], dtype=torch.float32), *args[1:], **(kwargs or {})))
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._copy_local_shard()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _full_tensor(self, parameter: DTensor) -> Tensor:
        """A full tensor to fill; this rank's shard is copied when the next one is requested."""
        self._copy_local_shard()
        device = self._device or parameter.to_local().device
        self._pending = (parameter, torch.empty(parameter.shape, dtype=torch.float32, device=device))
        return self._pending[1]

    @torch.no_grad()
    def _copy_local_shard(self) -> None:
        if self._pending is None:
            return
        (parameter, full), self._pending = self._pending, None
        shape, first = local_shape_and_offset(parameter)
        if all(shape):
            local = tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True))
            parameter.to_local().copy_(full[local])


def local_part(tensor: Tensor) -> tuple[Sequence[int], Tensor]:
    """Where the shard of this rank begins in the full tensor, and the shard."""
    if not isinstance(tensor, DTensor):
        return whole_tensor(tensor)
    _, begin = local_shape_and_offset(tensor)
    return begin, tensor.to_local()


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
