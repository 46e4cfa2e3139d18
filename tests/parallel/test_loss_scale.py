from __future__ import annotations

import math

import torch

from zero2all.model import ModelInputs
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.loss_scale import GROWTH_INTERVAL, DynamicLossScaler
from zero2all.recipe import ModelConfig, ParallelRecipe

CONFIG = ModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=128,
)


def gradients(dtype: torch.dtype, smaller: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    """Norm and gradients of one batch, its loss made smaller by a factor."""
    mesh = ParallelMesh.init_distributed(ParallelRecipe(), torch.device("cpu"))
    parallel_model = ParallelModel(CONFIG, ParallelRecipe(), mesh, seed=0, dtype=dtype)
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(0))
    parallel_model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=tokens[:, 1:].numel() * smaller)
    norm = parallel_model.clip_grad_norm_(math.inf).item()
    return norm, {name: p.grad for name, p in parallel_model.model.named_parameters() if p.grad is not None}


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
    scale = DynamicLossScaler()
    assert not scale.update(math.inf)
    assert scale.value == 2.0**15
    assert all(scale.update(1.0) for _ in range(GROWTH_INTERVAL))
    assert scale.value == 2.0**16
    again = DynamicLossScaler()
    again.load_state_dict(scale.state_dict())
    assert vars(again) == vars(scale)
