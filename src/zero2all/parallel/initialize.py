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

    FILLS = (Tensor.normal_, Tensor.fill_, Tensor.zero_, Tensor.uniform_)

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function not in self.FILLS or not isinstance(args[0], DTensor):
            return function(*args, **(kwargs or {}))
        parameter, rest = args[0], args[1:]
        local = parameter.to_local()
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        function(whole, *rest, **(kwargs or {}))
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        if all(shape):
            cut = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
            local.copy_(whole[cut])
        return parameter
