from __future__ import annotations

import math

import torch

from zero2all.parallel import Layout, Spread
from zero2all.parallel.loss_scale import PATIENCE, LossScale
from zero2all.recipe import ModelConfig, ParallelRecipe

CONFIG = ModelConfig(hidden_size=64, intermediate_size=128, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=128)


def gradients(dtype: torch.dtype, smaller: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    """Norm and gradients of one batch, its loss made smaller by a factor."""
    layout = Layout.start(ParallelRecipe(), torch.device("cpu"))
    spread = Spread(CONFIG, ParallelRecipe(), layout, seed=0, dtype=dtype)
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(0))
    spread.backward(tokens[:, :-1], tokens[:, 1:], tokens[:, 1:].numel() * smaller)
    norm = spread.clip(math.inf).item()
    return norm, {name: p.grad for name, p in spread.model.named_parameters() if p.grad is not None}


def test_a_scaled_loss_gives_the_gradient_of_the_loss() -> None:
    norm, exact = gradients(torch.float32)
    half_norm, half = gradients(torch.float16)
    assert abs(half_norm / norm - 1) < 1e-2
    for name, gradient in exact.items():
        assert (half[name] - gradient).norm() < 2e-2 * gradient.norm(), name


def test_small_gradients_are_not_lost() -> None:
    """Without the scale most of them would be nothing in fp16, which ends at 6e-8."""
    norm, _ = gradients(torch.float32, smaller=1e5)
    half_norm, _ = gradients(torch.float16, smaller=1e5)
    assert abs(half_norm / norm - 1) < 2e-2


def test_the_scale_falls_with_an_overflow_and_rises_after_quiet_steps() -> None:
    scale = LossScale()
    assert not scale.fits(math.inf)
    assert scale.value == 2.0**15
    assert all(scale.fits(1.0) for _ in range(PATIENCE))
    assert scale.value == 2.0**16
    again = LossScale()
    again.load(scale.state())
    assert vars(again) == vars(scale)
