"""Expert parallelism where one rank's experts get no token at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.model import poison
from tests.ranks import on_ranks
from zero2all.model import ModelInputs
from zero2all.model.moe import MoE
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe

CONFIG = ModelConfig.model_validate(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "vocab_size": 64,
        "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "load_balancing": "bias"},
    }
)


def gradients(sizes: dict[str, int]) -> dict[str, Tensor]:
    """Every token wants the first two experts of four, so with ep 2 the second rank receives nothing."""
    recipe = ParallelRecipe.model_validate(sizes)
    mesh = ParallelMesh.init_distributed(recipe, torch.device("cpu"))
    parallel_model = ParallelModel(CONFIG, recipe, mesh, seed=0)
    for module in parallel_model.model.modules():
        if isinstance(module, MoE):
            module.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    own = tokens.chunk(mesh.dims.dp)[mesh.dp_rank]
    parallel_model.forward_backward(ModelInputs(own[:, :-1], own[:, 1:]), divisor=tokens[:, 1:].numel())
    found = {name: p.grad for name, p in parallel_model.model.named_parameters() if p.grad is not None}
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    parallel_model.mesh.close()
    return full


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
