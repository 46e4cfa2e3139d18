"""Experts that get no token: kernels leave their blocks of the result as memory happened to be."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model import poison
from zero2all.model.ops import OPS, swiglu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def outputs_and_gradients(kernel: str, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), 12), (len(counts), 20, 12), (len(counts), 20, 12), (len(counts), 12, 20)]
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    x, *weights = inputs
    out = OPS["experts"][kernel].load()(x, torch.tensor(counts), *weights, swiglu.fused)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
    assert len(gradients) == len(inputs), "also what had nothing to do has a gradient: ranks add it up together"
    return [out.detach(), *gradients]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 4], [7, 0, 0], [0, 1, 0, 0, 2, 0], [4], [0, 0], [0]], ids=str)
def test_no_garbage_from_experts_without_tokens(
    counts: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = outputs_and_gradients("reference", counts, dtype)
    poison.install(monkeypatch)
    found = outputs_and_gradients("grouped", counts, dtype)
    for one, other in zip(found, plain, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for gradient in found[2:]:
        assert not gradient[torch.tensor(counts) == 0].any()


def test_the_gate_of_liger_is_not_launched_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class SiLUMul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            assert gate.numel(), "a grid of no blocks is a launch error"
            return torch.nn.functional.silu(gate) * up

    package, module = ModuleType("liger_kernel.ops"), ModuleType("liger_kernel.ops.swiglu")
    module.LigerSiLUMulFunction = SiLUMul  # type: ignore[attr-defined]
    for name, value in (("liger_kernel", package), (package.__name__, package), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, value)
    function = OPS["swiglu"]["liger"].load()
    empty = [torch.zeros(0, 8, requires_grad=True) for _ in range(2)]
    function(*empty).sum().backward()
    assert all(x.grad is not None and x.grad.shape == (0, 8) for x in empty)
    some = torch.ones(2, 8)
    assert torch.equal(function(some, some), swiglu.fused(some, some))
