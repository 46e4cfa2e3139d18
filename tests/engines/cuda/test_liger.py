"""Liger's kernels on CPU tensors, in Triton's interpreter, against our reference kernels: forward and gradients."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("liger_kernel", reason="Liger is not installed: see requirements.txt")
if os.environ.get("TRITON_INTERPRET") != "1":  # read where a kernel is defined, in Triton itself too
    pytest.skip("start pytest with TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl
from liger_kernel.ops import cross_entropy, rms_norm
from triton.runtime import interpreter

from tests.model.test_ops import assert_close, compare, random
from zero2all.model import IGNORE_INDEX
from zero2all.model.ops import OPS
from zero2all.model.ops.cross_entropy import HeadConfig

BOTH = ("liger", "reference")
FP32, BF16 = 1e-5, 4e-2
# The interpreter keeps bf16 as 16-bit integers and multiplies those: norm and SwiGLU in bf16 are for a GPU to show.
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, BF16)])


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU has and the interpreter lacks: floats that a kernel gets are fp32 scalars, so that Liger's
    ``eps.to(tl.float32)`` works, and two functions are in CUDA's own library."""
    convert = interpreter._implicit_cvt

    def convert_floats_too(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats_too)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(cross_entropy, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 100), (1, 1, 7)])
def test_norm(shape: tuple[int, ...]) -> None:
    assert_close(*compare("norm", BOTH, [random(1, *shape), random(2, shape[-1])], 1e-5), FP32)


@DTYPES
@pytest.mark.parametrize("own_positions", [False, True], ids=["shared", "packed"])
def test_rope(own_positions: bool, dtype: torch.dtype, tolerance: float) -> None:
    q, k = random(1, 2, 4, 6, 16, dtype=dtype), random(2, 2, 2, 6, 16, dtype=dtype)
    angles = random(3, *((2, 1, 6, 8) if own_positions else (6, 8)))
    angles = torch.cat([angles, angles], dim=-1)
    assert_close(*compare("rope", BOTH, [q, k], torch.stack([angles.cos(), angles.sin()])), tolerance)


@pytest.mark.parametrize("shape", [(2, 3, 33), (5, 128), (0, 16)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    assert_close(*compare("swiglu", BOTH, [random(1, *shape), random(2, *shape)]), FP32)


def losses(kernel: str, x: Tensor, weight: Tensor, targets: Tensor, head: HeadConfig, scale: Tensor) -> list[Tensor]:
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    out: Tensor = OPS["cross_entropy"][kernel].load()(x, weight, targets, head)
    (out * scale).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@DTYPES
@pytest.mark.parametrize("head", [HeadConfig(50), HeadConfig(50, softcap=4.0), HeadConfig(50, z_loss=0.01)], ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_cross_entropy(even: bool, head: HeadConfig, dtype: torch.dtype, tolerance: float) -> None:
    """Padded rows of the weight, ignored targets, and losses that weigh the same or not."""
    x, weight = random(1, 20, 16, dtype=dtype) * 0.5, (random(2, 64, 16) * 0.5).to(dtype).float()
    targets = torch.arange(20) % 50
    targets[::3] = IGNORE_INDEX
    scale = torch.full((20,), 0.1) if even else random(3, 20)
    found, wanted = (losses(kernel, x, weight, targets, head, scale) for kernel in BOTH)
    assert_close(found, wanted, tolerance)
