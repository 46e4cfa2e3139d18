"""The tensors of a run under names independent of the parallel layout: weights, optimizer state, random generators; and
silent data corruption: replicas of the same state on several ranks must be bitwise equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero2all.base.errors import Z2aError
from zero2all.base.torch_private import dtensor_like

# Optimizer groups list parameters by index, which differs between pipeline ranks: use names instead.
FLATTEN_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


OWN_STATE = "rng."
"""Prefix of the names of tensors that differ on every rank, also on replicas."""


class SyncState(Protocol):
    """The state that the synchronization of islands keeps from step to step."""

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors."""
        ...

    def reset(self) -> None:
        """Return to the state before the first step."""
        ...


def training_state_dict(model: nn.Module, optimizers: list[Optimizer], sync: SyncState | None = None) -> dict[str, Any]:
    """The live tensors, as DCP saves and loads them. An optimizer that has not stepped yet gets its state here."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers, options=FLATTEN_BY_NAME),
        "rng": rng_state(),
        "sync": {} if sync is None else sync.state_tensors(),
    }


def drop_unsaved(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Drop the tensors that were not ``saved`` from a state to load.

    A run that resumes with another world size has other generators. One that is synchronized in another way begins its
    synchronization from nothing.
    """
    state["rng"] = {name: value for name, value in state["rng"].items() if f"rng.{name}" in saved}
    sizes = {name: getattr(saved.get(f"sync.{name}"), "size", None) for name in state["sync"]}
    state["sync"] = {name: value for name, value in state["sync"].items() if sizes[name] == value.shape}


def load_training_state_dict(state: dict[str, Any], model: nn.Module, optimizers: list[Optimizer]) -> None:
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizers, state["optimizer"], options=FLATTEN_BY_NAME)
    for name, value in state["rng"].items():
        if name.startswith("cuda"):
            torch.cuda.set_rng_state(value)
        else:
            torch.set_rng_state(value)


def rng_state() -> dict[str, Tensor]:
    """The random generators of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {f"cpu-{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"cuda-{rank}"] = torch.cuda.get_rng_state()
    return state


def flatten_tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state by its path. The rest are settings, which come from the recipe at every start."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from flatten_tensors(value, f"{name}.{key}" if name else str(key))


def replace_tensors(state: Any, tensor_at: Callable[[str], Tensor], name: str = "") -> Any:
    """The same nested state with other tensors, given by their paths."""
    if isinstance(state, Tensor):
        return tensor_at(name)
    if isinstance(state, Mapping):
        return {
            key: replace_tensors(value, tensor_at, f"{name}.{key}" if name else str(key))
            for key, value in state.items()
        }
    return state


def local_shard(tensor: Tensor) -> Tensor:
    """The local shard of this rank."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def wrap_local_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as the local shard of ``tensor``, on any device: from_local would move it to a GPU."""
    return dtensor_like(tensor, shard) if isinstance(tensor, DTensor) else shard


def check_replicas(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise an error that names the tensor and the rank whose replica differs.

    Runs before a state is saved, so that in every saved state all replicas agreed.
    """
    shards = [(name, local_shard(tensor)) for name, tensor in tensors.items() if not name.startswith(OWN_STATE)]
    hashes = torch.stack(
        [torch.hash_tensor(shard) if shard.numel() else shard.new_zeros((), dtype=torch.uint64) for _, shard in shards]
    ).view(torch.int64)
    gathered = [torch.empty_like(hashes) for _ in range(group.size())]
    dist.all_gather(gathered, hashes, group=group)
    all_hashes = torch.stack(gathered)
    mismatched = (all_hashes != all_hashes[0]).any(dim=0).nonzero().flatten().tolist()
    if mismatched:
        ranks = dist.get_process_group_ranks(group)
        raise Z2aError(
            describe_mismatch(shards[mismatched[0]][0], len(mismatched), all_hashes[:, mismatched[0]].tolist(), ranks)
        )


def describe_mismatch(name: str, mismatched_tensors: int, hashes: list[int], ranks: list[int]) -> str:
    """A message with the outlier ranks if most agree, else with all ranks."""
    [(common, count), *_] = Counter(hashes).most_common()
    minority = [rank for rank, value in zip(ranks, hashes, strict=True) if value != common]
    if 2 * count <= len(hashes):
        who = f"on ranks {' and '.join(map(str, ranks))}, and no majority says which is right"
    else:
        who = f"on rank {' and '.join(map(str, minority))}, unlike on the {count} others"
    more = f" (and {mismatched_tensors - 1} other tensors)" if mismatched_tensors > 1 else ""
    return (
        f"copies of the model differ: {name}{more} differs {who}. Memory or arithmetic failed silently. "
        "The last saved state is from before it, and the same command resumes from there; if it happens again, exclude "
        "that machine"
    )
