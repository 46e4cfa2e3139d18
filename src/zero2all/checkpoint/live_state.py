"""The tensors that a checkpoint saves: a model, its optimizers, and what keeps a state beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero2all.checkpoint.state_dict import (
    SyncState,
    flatten_tensors,
    local_shard,
    replace_tensors,
    rng_state,
    training_state_dict,
    wrap_local_like,
)


@dataclass(frozen=True)
class CheckpointedModel:
    """A model and its optimizers on this rank."""

    model: nn.Module
    optimizers: list[Optimizer]
    sync: SyncState | None = None
    """The synchronization of gradients, if it keeps a state."""
    replica_group: dist.ProcessGroup | None = None
    """The ranks that hold the same state as this one."""

    def state_dict(self) -> dict[str, Any]:
        return training_state_dict(self.model, self.optimizers, self.sync)


class LiveState:
    """The tensors that training updates in place, collected once the optimizer has its state."""

    def __init__(self, trained: CheckpointedModel) -> None:
        self.nested = trained.state_dict()
        self.tensors = dict(flatten_tensors(self.nested))

    def update_rng(self) -> None:
        """Copy the random generators, whose states are no live tensors."""
        for name, value in rng_state().items():
            self.tensors[f"rng.{name}"].copy_(value)

    def can_be_staged(self) -> bool:
        return not any(map(_is_not_staged, self.tensors.values()))

    def with_shards(self, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        """The same nested state with ``shards`` as the local shards of its tensors."""
        nested: dict[str, Any] = replace_tensors(
            self.nested, lambda name: wrap_local_like(self.tensors[name], shards[name])
        )
        return nested


def _is_not_staged(tensor: Tensor) -> bool:
    """Quantized optimizer state is not plain bytes; state in files (parallel.offload) need not fit into memory."""
    shard = local_shard(tensor)
    return type(shard) is not Tensor or shard.untyped_storage().filename is not None
