"""Expert parallelism where one rank's experts get no token at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model import poison
from tests.parallel.helpers import BIAS_MOE, build_model, gradients, step
from tests.ranks import on_ranks
from zero2all.model.moe import MoE


def gradients_of_two_experts(sizes: dict[str, int]) -> dict[str, Tensor]:
    """Every token wants the first two experts of four, so with ep 2 the second rank receives nothing."""
    parallel_model = build_model("none", BIAS_MOE, sizes)
    for module in parallel_model.model.modules():
        if isinstance(module, MoE):
            module.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    step(parallel_model)
    return gradients(parallel_model)


def with_the_worst_kernel(sizes: dict[str, int]) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        poison.install(patch)
        return gradients_of_two_experts(sizes)


def test_a_rank_that_receives_no_token() -> None:
    plain = gradients_of_two_experts({})
    idle = plain["layers.0.mlp.experts.up_proj"]
    assert idle[:2].any()
    assert not idle[2:].any()
    for found in on_ranks(2, with_the_worst_kernel, {"ep": 2}):
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
