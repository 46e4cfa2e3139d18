"""FSDP moves every tensor argument to the GPU; the dropout seed is read before that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero2all.parallel.fsdp import read_dropout_seed


class Root(nn.Module):
    def forward(self, tokens_BS: Tensor, dropout_seed_1: Any = None) -> Any:
        return dropout_seed_1


def move_tensors(root: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """As FSDP's own hook does; tensors on meta cannot be read."""
    return args, {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def test_the_seed_is_read_before_tensors_are_moved() -> None:
    root = Root()
    root.register_forward_pre_hook(move_tensors, with_kwargs=True, prepend=True)
    root.register_forward_pre_hook(read_dropout_seed, with_kwargs=True, prepend=True)
    tokens = torch.zeros(1, 2)
    assert root(tokens_BS=tokens, dropout_seed_1=torch.tensor([2**40 + 1])) == 2**40 + 1
    assert root(tokens_BS=tokens) is None
