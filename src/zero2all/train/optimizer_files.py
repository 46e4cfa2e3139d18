"""The optimizer state in memory-mapped files, for models whose moments do not fit into host memory."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero2all.errors import Z2aError
from zero2all.parallel.sharded_init import to_local
from zero2all.torch_private import dtensor_like
from zero2all.units import show_bytes

MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = dict[Tensor, dict[str, Tensor]]


def map_optimizer_state(optimizers: list[Optimizer], directory: Path) -> None:
    """Give AdamW its state before the first step, with a file under ``directory`` for each moment of each parameter.

    The files have no name once they are mapped: the system deletes them when the process ends, in whatever way.
    """
    for optimizer in optimizers:
        moments: Moments = {
            parameter: {name: _zeros_in_file(parameter, directory) for name in MOMENTS}
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for parameter, tensors in moments.items():
            optimizer.state[parameter] = {"step": torch.zeros(()), **tensors}
        optimizer.register_load_state_dict_post_hook(partial(_copy_into_files, moments))


def _zeros_in_file(parameter: Tensor, directory: Path) -> Tensor:
    """Zeros like the local shard of a parameter."""
    shard = to_local(parameter)
    if shard.numel() == 0:
        return torch.zeros_like(parameter)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="z2a-optimizer-") as file:
            if hasattr(os, "posix_fallocate"):  # fails here if the disk is full, not by a SIGBUS later
                os.posix_fallocate(file.fileno(), 0, shard.nbytes)
            zeros = torch.from_file(file.name, shared=True, size=shard.numel(), dtype=shard.dtype).view_as(shard)
    except OSError as error:
        raise Z2aError(
            f"no file of {show_bytes(shard.nbytes)} for the optimizer state in {directory} "
            f"({error.strerror or error}): free space there, or change parallel.offload"
        ) from error
    return dtensor_like(parameter, zeros) if isinstance(parameter, DTensor) else zeros


def _copy_into_files(moments: Moments, optimizer: Optimizer) -> None:
    """After a load, which may have put tensors in memory in the place of those in files."""
    for parameter, tensors in moments.items():
        state = optimizer.state[parameter]
        for name, mapped in tensors.items():
            if state[name] is not mapped:
                to_local(mapped).copy_(to_local(state[name]))
                state[name] = mapped
