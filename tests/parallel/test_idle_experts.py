"""Expert parallelism where one rank's experts get no token at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.model import poison
from tests.ranks import on_ranks
from zero2all.model.moe import MoE
from zero2all.parallel import Layout, Spread
from zero2all.recipe import ModelConfig, ParallelRecipe

CONFIG = ModelConfig.model_validate(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "context": 16,
        "vocab_size": 64,
        "moe": {"experts": 4, "top_k": 2, "expert_intermediate": 16, "balance": "bias"},
    }
)


def gradients(sizes: dict[str, int]) -> dict[str, Tensor]:
    """Every token wants the first two experts of four, so with ep 2 the second rank receives nothing."""
    recipe = ParallelRecipe.model_validate(sizes)
    layout = Layout.start(recipe, torch.device("cpu"))
    spread = Spread(CONFIG, recipe, layout, seed=0)
    for mixture in spread.model.modules():
        if isinstance(mixture, MoE):
            mixture.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    own = tokens.chunk(layout.sizes.dp)[layout.dp_rank]
    spread.backward(own[:, :-1], own[:, 1:], tokens[:, 1:].numel())
    found = {name: p.grad for name, p in spread.model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    spread.close()
    return whole


def with_the_worst_kernel(sizes: dict[str, int]) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        poison.install(patch)
        return gradients(sizes)


def test_a_rank_that_receives_no_token() -> None:
    plain = gradients({})
    idle = plain["layers.0.mlp.experts.up_proj"]
    assert idle[:2].any()
    assert not idle[2:].any()
    for found in on_ranks(2, with_the_worst_kernel, {"ep": 2}):
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
