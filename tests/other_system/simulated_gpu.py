"""A GPU without fp64, as a Mac has one, simulated: torch's backend for experiments (PrivateUse1), computed by the CPU.

It refuses what the GPU of a Mac refuses: fp64, tensors of two devices in one operation, and operations that are
implemented for CPUs only; and copies that do not block, which go wrong there. Operations of zero2all run in Python, as
they would there, so that their inner ones are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "simulated"
DEVICE_OF_OTHERS = ("copy_", "_to_copy", "_foreach_copy_", "index", "index_put_")  # may mix tensors of two devices


class SimulatedTensor(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> SimulatedTensor:
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"the simulated GPU has no {inner.dtype}")
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.inner})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class SimulatedFactories(TorchDispatchMode):
    """Tensors are created on the simulated device, or moved to it, by operations that have none of its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class SimulatedFunctions(TorchFunctionMode):
    """Functions that torch itself does not compute on such a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and (device := (kwargs or {}).get("device")) is not None:
            return torch.tensor(*args, **{**kwargs, "device": None}).to(device)
        if func is F.scaled_dot_product_attention and isinstance(args[0], SimulatedTensor):
            # The choice between fused kernels is not made for it; a Mac also trains with the plain formula.
            options = {name: kwargs[name] for name in ("attn_mask", "is_causal", "enable_gqa") if name in kwargs}
            if (mask := options.get("attn_mask")) is not None:  # here added to the scores
                options["attn_mask"] = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **options)[0]
        return func(*args, **(kwargs or {}))


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    simulated = any(isinstance(tensor, SimulatedTensor) for tensor in tensors)
    name = func.name().split(".")[0]
    if simulated and name in OPDEFS:
        functions = OPDEFS[name]._backend_fns
        if None not in functions:
            raise NotImplementedError(f"{name} is implemented for {', '.join(map(str, functions))} only")
        with SimulatedFactories():  # off while it computes
            return functions[None](*args, **kwargs)
    device = kwargs.get("device")
    to_simulated = simulated if device is None else device.type == NAME
    is_mixed = simulated and any(tensor.dim() and not isinstance(tensor, SimulatedTensor) for tensor in tensors)
    if is_mixed and name.removeprefix("aten::") not in DEVICE_OF_OTHERS:
        raise RuntimeError(f"{name}: tensors of the CPU and of the simulated GPU")
    if to_simulated and kwargs.get("non_blocking"):
        raise RuntimeError(f"{name}: a Mac would copy memory that is freed meanwhile")
    inner_args, inner_kwargs = tree_map(
        lambda leaf: leaf.inner if isinstance(leaf, SimulatedTensor) else leaf, (args, kwargs)
    )
    if device is not None and device.type == NAME:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    if not to_simulated:
        return out
    wrapped = tree_map(lambda leaf: SimulatedTensor(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class CpuGenerator(torch.Generator):
    def __new__(cls, device: Any = None) -> CpuGenerator:
        return super().__new__(cls)


class Backend(_DummyBackendModule):
    def is_available(self) -> bool:
        """Only DCP asks, which would copy in streams, as it does not on a Mac."""
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@contextmanager
def simulated_gpu() -> Iterator[torch.device]:
    """The device, until the end of the block. Before zero2all is imported."""
    _setup_privateuseone_for_python_backend(NAME, Backend())
    from zero2all.base.machine import devices as hardware

    hardware.MPS = NAME
    torch.Generator = CpuGenerator  # type: ignore[misc]
    torch.inference_mode = torch.no_grad  # type: ignore[misc, assignment]  # wrappers of tensors need version counters
    torch.mps.synchronize = lambda: None
    torch.mps.driver_allocated_memory = lambda: 1 << 20
    torch.backends.mps.get_name = lambda: NAME  # type: ignore[attr-defined]
    with SimulatedFactories(), SimulatedFunctions():
        yield torch.device(NAME, 0)
