"""Gradients of norms under tensor parallelism: partial sums, reduced together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import on_ranks
from zero2all.model import ModelInputs
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe

CONFIG = ModelConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=16, vocab_size=64, qk_norm=True,
)  # fmt: skip
LOSS_ALL_REDUCES = 3  # of the parallel loss, in each micro-batch


class FunctionalAllReduces(TorchDispatchMode):
    """Those of DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_c10d_functional::all_reduce" in func.name()
        return func(*args, **(kwargs or {}))


def gradients(sizes: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    """After two batches of two micro-batches that are added up; and the all-reduces in the second."""
    recipe = ParallelRecipe.model_validate(sizes)
    mesh = ParallelMesh.init_distributed(recipe, torch.device("cpu"))
    parallel_model = ParallelModel(CONFIG, recipe, mesh, seed=0)
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
    found = {name: p.grad for name, p in parallel_model.model.named_parameters() if p.grad is not None}
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    full["norm"] = parallel_model.clip_grad_norm_(1e9)
    parallel_model.mesh.close()
    return full, [*calls, *[0] * functional.count]


def both(layouts: list[dict[str, Any]]) -> list[tuple[dict[str, Tensor], list[int]]]:
    return [gradients(sizes) for sizes in layouts]


@pytest.mark.long
def test_gradients_of_norms_are_reduced_in_one_all_reduce() -> None:
    plain, _ = gradients({})
    with_sp, without_sp = 2 * (2 * 32 + 2 * 8) + 32, 2 * 2 * 8
    for found in on_ranks(2, both, [{"tp": 2}, {"tp": 2, "sp": False}]):
        for (full, calls), numel in zip(found, (with_sp, without_sp), strict=True):
            for name, gradient in plain.items():
                torch.testing.assert_close(full[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
            assert calls.count(numel) == 1, calls
        assert len(found[0][1]) == 2 * LOSS_ALL_REDUCES + 1, found[0][1]
