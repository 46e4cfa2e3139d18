"""The gradient of the output head, where its weight is in bf16, as FSDP gathers it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from zero2all.model.ops import OPS
from zero2all.model.ops import chunked_loss as chunked_loss_module
from zero2all.model.ops.chunked_loss import chunk_rows
from zero2all.model.ops.cross_entropy import HeadConfig

VOCAB, TOKENS, SIZE = 2048, 4096, 32


@pytest.fixture(scope="module")
def case() -> tuple[Tensor, Tensor, Tensor]:
    """Words as frequent as in text: the commonest are in every chunk, and their sums are the longest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, SIZE, generator=generator).bfloat16()
    weight = (torch.randn(VOCAB, SIZE, generator=generator) * 0.02).bfloat16()
    frequency = 1 / torch.arange(1, VOCAB + 1, dtype=torch.float)
    return x, weight, torch.multinomial(frequency, TOKENS, replacement=True, generator=generator)


def gradient(kernel: str, x: Tensor, weight: Tensor, targets: Tensor, scale: float, even: bool) -> Tensor:
    weight = weight.detach().clone().requires_grad_()
    losses = OPS["cross_entropy"][kernel].load()(x, weight, targets, HeadConfig(VOCAB))
    (losses.sum() * scale if even else (losses * torch.full_like(losses, scale)).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == weight.dtype
    return weight.grad


def exact(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
    wide = weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(x.double() @ wide.T, targets, reduction="sum").mul(scale).backward()
    assert wide.grad is not None
    return wide.grad


@pytest.mark.parametrize("even", [True, False], ids=["one weight", "own weights"])
@pytest.mark.parametrize("scale", [1.0, 1 / 3000], ids=["sum", "mean"])
def test_the_sum_over_chunks_is_as_good_as_one_product(
    case: tuple[Tensor, Tensor, Tensor], scale: float, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss_module, "CHUNK_BYTES", 4 * VOCAB * 64)  # 64 chunks of 64 rows
    x, weight, targets = case
    truth = exact(x, weight, targets, scale)

    def error(kernel: str, rows: slice) -> float:
        found = gradient(kernel, x, weight, targets, scale, even).double()
        return float((found - truth)[rows].norm() / truth[rows].norm())

    for rows in (slice(None), slice(50)):  # all, and the commonest
        assert error("chunked", rows) < 1.02 * error("reference", rows)


@pytest.mark.parametrize("even", [True, False], ids=["one weight", "own weights"])
def test_one_product_in_bf16_is_as_good_as_the_reference(case: tuple[Tensor, Tensor, Tensor], even: bool) -> None:
    x, weight, targets = case
    assert chunk_rows(VOCAB, x.device) >= TOKENS >= chunked_loss_module.CPU_HALF_ROWS
    truth = exact(x, weight, targets, 1.0)
    error, reference_error = (
        float((gradient(kernel, x, weight, targets, 1.0, even).double() - truth).norm() / truth.norm())
        for kernel in ("chunked", "reference")
    )
    assert error < 1.02 * reference_error


def test_chunks_are_as_large_as_the_device_likes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert chunk_rows(131072, cpu) == 128
    assert chunk_rows(10**7, cpu) == 16
    # Each chunk reads the full weight three times, so that a GPU wants many rows in one.
    assert [chunk_rows(vocab, cuda) for vocab in (1024, 32768, 65536, 131072, 10**7)] == [4096, 4096, 2048, 1024, 1024]


def test_liger_is_asked_to_add_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Fused:
        @staticmethod
        def apply(
            x: Tensor,
            weight: Tensor,
            target: Tensor,
            bias: None,
            ce_weight: None,
            ignore_index: int,
            lse_square_scale: float,
            label_smoothing: float,
            reduction: str,
            softcap: float | None,
            return_z_loss: bool,
            accum_dtype: torch.dtype | None = None,
        ) -> tuple[Tensor, Tensor]:
            given.update(reduction=reduction, return_z_loss=return_z_loss, accum_dtype=accum_dtype)
            return torch.zeros(len(x)), torch.zeros(len(x))

    package, module = ModuleType("liger_kernel"), ModuleType("liger_kernel.ops.fused_linear_cross_entropy")
    module.LigerFusedLinearCrossEntropyFunction = Fused  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loss = OPS["cross_entropy"]["liger"].load()
    loss(torch.ones(2, 8), torch.ones(64, 8), torch.zeros(2, dtype=torch.int64), HeadConfig(60))
    assert given == {"reduction": "none", "return_z_loss": True, "accum_dtype": torch.float32}
