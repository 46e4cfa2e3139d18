"""The tensors of a run under names that do not depend on the layout: weights, optimizer state, random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

# Groups of an optimizer list parameters by number, and pipeline ranks have different ones: names instead.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """The live tensors, as DCP saves and loads them. An optimizer that has not stepped yet gets its state here."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers, options=BY_NAME),
        "rng": rng_state(),
    }


def put_state(state: dict[str, Any], model: nn.Module, optimizers: list[Optimizer]) -> None:
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizers, state["optimizer"], options=BY_NAME)
    for name, value in state["rng"].items():
        if name.startswith("cuda"):
            torch.cuda.set_rng_state(value)
        else:
            torch.set_rng_state(value)


def rng_state() -> dict[str, Tensor]:
    """Every rank has generators of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {f"cpu-{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"cuda-{rank}"] = torch.cuda.get_rng_state()
    return state


def tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state by its path. The rest are settings, which the recipe gives anew at every start."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_in(value, f"{name}.{key}" if name else str(key))


def with_tensors(state: Any, replace: Callable[[str], Tensor], name: str = "") -> Any:
    """The same nested state with other tensors, given by their paths."""
    if isinstance(state, Tensor):
        return replace(name)
    if isinstance(state, Mapping):
        return {
            key: with_tensors(value, replace, f"{name}.{key}" if name else str(key)) for key, value in state.items()
        }
    return state


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """``part`` in the place of this rank's part of ``tensor``, wherever it is: from_local would move it to a GPU."""
    if not isinstance(tensor, DTensor):
        return part
    inner = {"_local_tensor": part, "device_mesh": tensor.device_mesh}
    spec = tensor.__tensor_flatten__()[1]  # type: ignore[no-untyped-call]
    size, stride = tensor.size(), tensor.stride()
    whole: Tensor = DTensor.__tensor_unflatten__(inner, spec, size, stride)  # type: ignore[no-untyped-call]
    return whole
