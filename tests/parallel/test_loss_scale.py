"""Norms and gradients with a loss scale, which half precision needs, and without: as plain autograd has them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.parallel.helpers import gradients, make_model, small_config
from zero2all.model import ModelInputs, Z2all
from zero2all.parallel import ParallelModel
from zero2all.parallel.loss_scale import GROWTH_INTERVAL, DynamicLossScaler

CONFIG = small_config(hidden_size=64, intermediate_size=128, num_hidden_layers=3, vocab_size=128)
TOKENS = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def trained(dtype: torch.dtype, smaller: float = 1.0, max_norm: float = math.inf) -> tuple[float, ParallelModel]:
    """The norm of the gradient of one batch, its loss made smaller by a factor."""
    parallel_model = make_model({}, CONFIG, dtype=dtype)
    parallel_model.forward_backward(ModelInputs(INPUTS, TARGETS), divisor=TARGETS.numel() * smaller)
    return parallel_model.clip_grad_norm_(max_norm).item(), parallel_model


def test_a_scaled_loss_gives_the_gradient_of_the_loss() -> None:
    norm, exact = trained(torch.float32)
    half_norm, half = trained(torch.float16)
    assert abs(half_norm / norm - 1) < 1e-2
    found = gradients(half)
    for name, gradient in gradients(exact).items():
        assert (found[name] - gradient).norm() < 2e-2 * gradient.norm(), name


def test_small_gradients_are_not_lost() -> None:
    """Without the scale most of them would be nothing in fp16, which ends at 6e-8."""
    norm, _ = trained(torch.float32, smaller=1e5)
    half_norm, _ = trained(torch.float16, smaller=1e5)
    assert abs(half_norm / norm - 1) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16 with a loss scale"])
def test_the_norm_of_each_layer_is_that_of_plain_autograd(dtype: torch.dtype) -> None:
    total, parallel_model = trained(dtype, max_norm=1e-3)
    norms = parallel_model.gradient_norms.by_layer.tolist()
    plain = Z2all(CONFIG).init_weights(0)
    plain(INPUTS, targets_BS=TARGETS).mean().backward()
    expected = [
        math.sqrt(sum(float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None))
        for layer in plain.layers
    ]
    assert norms == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert sum(norm**2 for norm in norms) < total**2  # embeddings and head have gradients too


def test_the_scale_falls_with_an_overflow_and_rises_after_quiet_steps() -> None:
    scale = DynamicLossScaler()
    assert not scale.update(math.inf)
    assert scale.value == 2.0**15
    assert all(scale.update(1.0) for _ in range(GROWTH_INTERVAL))
    assert scale.value == 2.0**16
    again = DynamicLossScaler()
    again.load_state_dict(scale.state_dict())
    assert vars(again) == vars(scale)
