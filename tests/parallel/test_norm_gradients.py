"""Gradients of norms under tensor parallelism: partial sums, reduced together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.helpers import gradients, make_model, small_config
from tests.ranks import on_ranks
from zero2all.model import ModelInputs

LOSS_ALL_REDUCES = 3  # of the parallel loss, in each micro-batch


class FunctionalAllReduces(TorchDispatchMode):
    """Those of DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_c10d_functional::all_reduce" in func.name()
        return func(*args, **(kwargs or {}))


def reduced(sizes: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    """After two batches of two micro-batches that are added up; and the all-reduces in the second."""
    parallel_model = make_model(sizes, small_config(qk_norm=True))
    tokens = torch.randint(0, 64, (8, 13), generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    original = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **more: Any) -> Any:
        calls.append(tensor.numel())
        return original(tensor, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for batch in tokens.split(4):
            calls.clear()
            patch.setattr(dist, "all_reduce", noted)
            with FunctionalAllReduces() as functional:
                parallel_model.forward_backward(
                    ModelInputs(batch[:, :-1], batch[:, 1:]), divisor=48, micro_batch_size=2
                )
    full = gradients(parallel_model)
    full["norm"] = parallel_model.clip_grad_norm_(1e9)
    return full, [*calls, *[0] * functional.count]


def both(layouts: list[dict[str, Any]]) -> list[tuple[dict[str, Tensor], list[int]]]:
    return [reduced(sizes) for sizes in layouts]


@pytest.mark.long
def test_gradients_of_norms_are_reduced_in_one_all_reduce() -> None:
    plain, _ = reduced({})
    with_sp, without_sp = 2 * (2 * 32 + 2 * 8) + 32, 2 * 2 * 8
    for found in on_ranks(2, both, [{"tp": 2}, {"tp": 2, "sp": False}]):
        for (full, calls), numel in zip(found, (with_sp, without_sp), strict=True):
            for name, gradient in plain.items():
                torch.testing.assert_close(full[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
            assert calls.count(numel) == 1, calls
        assert len(found[0][1]) == 2 * LOSS_ALL_REDUCES + 1, found[0][1]
