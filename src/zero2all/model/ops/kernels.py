"""What a kernel of an operation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from zero2all.recipe import ModelConfig

IGNORE_INDEX = -100
"""A target with this value has no loss."""
AvailabilityCheck = Callable[[torch.device, ModelConfig], str | None]


def always_available(device: torch.device, config: ModelConfig) -> str | None:
    return None


def needs_cuda(package: str) -> AvailabilityCheck:
    """For kernels that come from a package and run on NVIDIA GPUs only."""

    def unavailable_reason(device: torch.device, config: ModelConfig) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device.type}"
        return None if find_spec(package) else f"{package} is not installed"

    return unavailable_reason


@dataclass(frozen=True)
class Kernel:
    """One way to compute an operation."""

    load: Callable[[], Any]
    """Returns what computes it. Packages that may be missing are imported here and not before."""
    unavailable_reason: AvailabilityCheck = always_available
    """Why it cannot be used on a device for a model, or None if it can."""


def builtin_kernel(function: Any) -> Kernel:
    """A kernel that needs no package."""
    return Kernel(lambda: function)
