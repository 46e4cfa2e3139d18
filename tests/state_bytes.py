"""Bytes that tensors take in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zero2all.parallel.sharded_init import to_local


def tensor_bytes(value: Any) -> int:
    """Of this rank's shard of a tensor; of a quantized one, codes, scales and table. A step counter does not count."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 0
    local = to_local(value)
    if type(local) in (torch.Tensor, torch.nn.Parameter):
        return local.nbytes
    return sum(getattr(local, name).nbytes for name in local.__tensor_flatten__()[0])


def state_bytes(optimizers: list[Optimizer]) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(tensor_bytes(value) for state in states for value in state.values())
