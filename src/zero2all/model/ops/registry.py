"""Which kernel of each operation is used, and why not another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero2all.base.errors import UsageError
from zero2all.model.ops import attention, cross_entropy, experts, norm, rope, swiglu
from zero2all.model.ops.kernels import Kernel
from zero2all.recipe import ModelConfig

# Kernels of each operation, in the order that auto prefers.
OPS: dict[str, dict[str, Kernel]] = {
    "attention": attention.KERNELS,
    "norm": norm.KERNELS,
    "rope": rope.KERNELS,
    "swiglu": swiglu.KERNELS,
    "cross_entropy": cross_entropy.KERNELS,
    "experts": experts.KERNELS,
}


@dataclass(frozen=True)
class KernelChoice:
    """One row of the table: what computes an operation, and for each other kernel why it does not."""

    op: str
    form: str
    others: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"{kernel}: {why}" for kernel, why in self.others.items())
        return f"{self.op} {self.form}" + (f" ({others})" if others else "")


class Ops:
    """The chosen functions by their operation's name (``ops.norm(...)``), and the table of choices behind them."""

    attention: attention.AttentionBackend
    norm: norm.Norm
    rope: rope.Rope
    swiglu: swiglu.SwiGLU
    cross_entropy: cross_entropy.CrossEntropy
    experts: experts.ExpertsOp

    def __init__(self, choices: list[KernelChoice]) -> None:
        self.choices = tuple(choices)
        for choice in choices:
            setattr(self, choice.op, OPS[choice.op][choice.form].load())

    def __getitem__(self, op: str) -> KernelChoice:
        return next(choice for choice in self.choices if choice.op == op)


def choose_kernels(config: ModelConfig, device: torch.device) -> Ops:
    """The kernels that the recipe names, or with auto the first that runs on the device."""
    return Ops([_choose_kernel(op, kernels, getattr(config.ops, op), config, device) for op, kernels in OPS.items()])


def _choose_kernel(
    op: str, kernels: dict[str, Kernel], wanted: str, config: ModelConfig, device: torch.device
) -> KernelChoice:
    reasons = {name: kernel.unavailable_reason(device, config) for name, kernel in kernels.items()}
    if wanted == "auto":
        chosen = next(name for name, reason in reasons.items() if reason is None)
        otherwise = f"{chosen} comes first"
    else:
        chosen, otherwise = wanted, "the recipe names another"
        if reasons[chosen] is not None:
            raise UsageError(f"model.ops.{op}={chosen} cannot be used: {reasons[chosen]}; try model.ops.{op}=auto")
    others = {name: reason or otherwise for name, reason in reasons.items() if name != chosen}
    return KernelChoice(op, chosen, others)
