from __future__ import annotations

import math

import pytest
import torch

from zero2all.model import ModelInputs, Z2all
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe

CONFIG = ModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=128,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16 with a loss scale"])
def test_the_norm_of_each_layer_is_that_of_plain_autograd(dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mesh = ParallelMesh.init_distributed(ParallelRecipe(), torch.device("cpu"))
    parallel_model = ParallelModel(CONFIG, ParallelRecipe(), mesh, seed=0, dtype=dtype)
    parallel_model.forward_backward(ModelInputs(inputs, targets), divisor=targets.numel())
    total = parallel_model.clip_grad_norm_(1e-3).item()
    norms = parallel_model.gradient_norms.by_layer.tolist()

    plain = Z2all(CONFIG)
    plain.init_weights(0)
    plain(inputs, targets_BS=targets).mean().backward()
    expected = [
        math.sqrt(sum(float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None))
        for layer in plain.layers
    ]
    assert norms == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert sum(norm**2 for norm in norms) < total**2  # embeddings and head have gradients too
