"""A forward pass on a GPU that is not there.

Fake CUDA tensors have a shape, a type and a device, and no values. torch's CUDA build makes them without a GPU; what
mixes devices raises. Autograd needs a device, so there is no backward pass.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero2all

PACKAGE = Path(zero2all.__file__).parent
CUDA = torch.device("cuda", 0)
HOPPER = (9, 0)


class HostSync(NamedTuple):
    """An operation for which the host waits for the GPU, and the line of zero2all that calls it."""

    op: str
    place: str

    def __str__(self) -> str:
        return f"{self.op} at {self.place}"


class HostSyncs(TorchDispatchMode):
    """Lists the host syncs of what runs under it: copies between devices that block, and results whose value or shape
    depends on data.

    Each data-dependent result is replaced by one that fits, so that all that follows is seen too. Our own operations
    run in Python: torch takes their fake implementation, which says nothing of what they do inside.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[HostSync] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        name = func.name().split(".")[0]
        if name in OPDEFS and name.startswith("zero2all::"):
            with self:
                return OPDEFS[name]._backend_fns[None](*args, **kwargs)
        if name in DATA_DEPENDENT and any(tensor.device.type == "cuda" for tensor in _tensors(args)):
            self._record(name)
            return DATA_DEPENDENT[name](*args, **kwargs)
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self._record(name)
            return args[0].new_empty(len(args[0]))
        if name == "aten::index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self._record("aten::nonzero")
            return args[0].new_empty(args[1][0].numel(), *args[0].shape[args[1][0].dim() :])
        out = func(*args, **kwargs)
        if (
            name != "prim::device"
            and _crosses_devices(name, args, kwargs, out)
            and not _non_blocking(func, args, kwargs)
        ):
            self._record(name)
        return out

    def _record(self, name: str) -> None:
        ours = [frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents]
        place = f"{Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].name}" if ours else "the caller"
        self.found.append(HostSync(name.removeprefix("aten::"), place))


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.numel(), tensor.dim(), dtype=torch.int64)  # where every element is set


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return tensor.new_empty(max(1, minlength), dtype=torch.int64)


DATA_DEPENDENT = {
    "aten::_local_scalar_dense": lambda tensor: 1,
    "aten::nonzero": _nonzero,
    "aten::bincount": _bincount,
    "aten::masked_select": lambda tensor, mask: tensor.new_empty(tensor.numel()),
    "aten::equal": lambda left, right: True,
}


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _crosses_devices(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    """A number on the CPU may be an argument of a CUDA kernel: nothing is copied, unless that is the operation."""
    inputs = [tensor for tensor in _tensors(args, kwargs) if tensor.dim() or name in ("aten::_to_copy", "aten::copy_")]
    return {tensor.device.type for tensor in [*inputs, *_tensors(out)]} >= {"cpu", "cuda"}


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool(kwargs.get("non_blocking") or dict(zip(names, args, strict=False)).get("non_blocking"))


class _CpuGenerator(torch.Generator):
    """A generator of a GPU cannot be made without one; fake tensors take any."""

    def __new__(cls, device: Any = None) -> _CpuGenerator:
        return super().__new__(cls)


def _to_empty(module: nn.Module, *, device: torch.device) -> nn.Module:
    """``nn.Module.to_empty`` swaps tensors in place, which fake ones that torch has cached a result of refuse."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty_like(buffer, device=device))
    return module


@contextmanager
def fake_cuda() -> Iterator[HostSyncs]:
    """New tensors are fake, and on CUDA; yields the host syncs. torch believes that the GPU is a Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)  # else no autocast
        patch.setattr(torch, "Generator", _CpuGenerator)
        patch.setattr(nn.Module, "to_empty", _to_empty)
        patch.setattr(torch, "compile", lambda function, **options: function)  # it brings a fake mode of its own
        with FakeTensorMode(), HostSyncs() as syncs, CUDA:
            yield syncs
