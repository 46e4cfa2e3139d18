"""What a form of an operation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from zero2all.recipe import ModelConfig

IGNORE = -100  # a target that counts for nothing
WhyNot = Callable[[torch.device, ModelConfig], str | None]


def runs_everywhere(device: torch.device, config: ModelConfig) -> str | None:
    return None


def needs_cuda(package: str) -> WhyNot:
    """For kernels that come from a package and run on NVIDIA GPUs only."""

    def why_not(device: torch.device, config: ModelConfig) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device.type}"
        return None if find_spec(package) else f"{package} is not installed"

    return why_not


@dataclass(frozen=True)
class Form:
    """One way to compute an operation."""

    load: Callable[[], Any]
    """Gives what computes it. Packages that may be missing are imported here and not before."""
    why_not: WhyNot = runs_everywhere
    """Why it cannot be used on a device for a model, or None if it can."""
    not_deterministic: str | None = None
    """Why it cannot be used on a GPU that is to give the same bits every time, or None if it can."""


def plain(function: Any) -> Form:
    """A form that is there whatever is installed."""
    return Form(lambda: function)
