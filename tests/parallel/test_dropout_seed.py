"""FSDP moves every tensor argument to the GPU; a pipeline stage reads its dropout seed before that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs

from zero2all.model import ModelInputs
from zero2all.parallel.fsdp import read_dropout_seed


class Root(nn.Module):
    def forward(self, tokens_BS: Tensor, dropout_seeds_M: Any = None) -> Any:
        return dropout_seeds_M


def move_tensors(root: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """As FSDP's own hook does; tensors on meta cannot be read."""
    return args, {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def test_the_seed_is_read_before_tensors_are_moved() -> None:
    root = Root()
    root.register_forward_pre_hook(move_tensors, with_kwargs=True, prepend=True)
    root.register_forward_pre_hook(read_dropout_seed, with_kwargs=True, prepend=True)
    tokens = torch.zeros(1, 2)
    assert root(tokens_BS=tokens, dropout_seeds_M=torch.tensor([2**40 + 1])) == 2**40 + 1
    assert root(tokens_BS=tokens) is None


def test_seeds_inside_of_model_inputs_stay_in_main_memory() -> None:
    inputs = ModelInputs(torch.zeros(1, 2), dropout_seeds_M=torch.tensor([5]))
    moved, _ = _to_kwargs((inputs,), {}, torch.device("meta"), False)
    assert moved[0][0].dropout_seeds_M.device.type == "cpu"
