"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): two small matrices beside a frozen one are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.recipe.model import LoraConfig

ADAPTER_MARK = ".lora_"


class LoRALinear(nn.Linear):
    """A frozen matrix W, and beside it scaling * B @ A. B begins at zero, so that the model begins as it was."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, lora: LoraConfig) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.scaling = lora.alpha / lora.rank
        self.lora_A = nn.Parameter(torch.empty(lora.rank, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, lora.rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the matrix, in fp32, and start again from zero."""
        self.weight += (self.scaling * self.lora_B.float() @ self.lora_A.float()).to(self.weight.dtype)
        self.lora_B.zero_()


def projection(
    lora: LoraConfig | None, name: str, in_features: int, out_features: int, *, bias: bool = False
) -> nn.Linear:
    """The matrix of a block, with an adapter if one is asked for."""
    if lora is None or name not in lora.target_modules:
        return nn.Linear(in_features, out_features, bias=bias)
    return LoRALinear(in_features, out_features, bias=bias, lora=lora)


def freeze_all_but_adapters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(ADAPTER_MARK in name)


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def merge_adapters(model: nn.Module) -> None:
    """Put what the adapters learned into the matrices; the model computes the same."""
    for _, module in adapters(model):
        module.merge()


def initial_adapter_std(name: str, parameter: Tensor) -> float:
    """PEFT's choice: A as PyTorch initializes a matrix (the standard deviation of a uniform distribution), B zero."""
    return 1 / math.sqrt(3 * parameter.shape[1]) if name.endswith("lora_A") else 0.0
