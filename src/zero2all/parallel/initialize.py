"""Weights of a model in shards, equal to those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode


class WholeFill(TorchFunctionMode):
    """Inside it, filling a DTensor fills the whole tensor and keeps this rank's shard of it.

    A model's ``init_weights`` draws each parameter from (seed, its name). Under this mode it runs unchanged on a model
    in shards: one parameter at a time is whole, no rank talks to another, and every layout begins equal.
    """

    FILLS = (Tensor.normal_, Tensor.fill_, Tensor.zero_)

    def __init__(self) -> None:
        super().__init__()
        self._open: tuple[DTensor, Tensor] | None = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], DTensor):
            if function in self.FILLS:
                whole = self._whole(args[0])
                function(whole, *args[1:], **(kwargs or {}))
                return args[0]
            if function is Tensor.unbind:  # filled part by part, as experts are
                return self._whole(args[0]).unbind(*args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._keep()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _whole(self, parameter: DTensor) -> Tensor:
        """A whole tensor to be filled; the rank's shard of it is kept when the next one is asked for."""
        self._keep()
        device = parameter.to_local().device
        self._open = (parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
        return self._open[1]

    @torch.no_grad()
    def _keep(self) -> None:
        if self._open is None:
            return
        (parameter, whole), self._open = self._open, None
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, first = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        if all(shape):
            cut = tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True))
            parameter.to_local().copy_(whole[cut])
