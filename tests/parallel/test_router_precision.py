"""Under FSDP with bf16 a router computes with its weight in fp32, and so do its gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.helpers import full, make_model, small_config
from tests.ranks import on_ranks
from zero2all.model import ModelInputs, Z2all
from zero2all.model.moe import Router

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "load_balancing": "bias"}
CONFIG = small_config(vocab_size=320, mtp_weight=0.3, moe=EXPERTS)
SAMPLES, LENGTH = 4, 32


class Seen(NamedTuple):
    """Of one router on one rank."""

    tokens: Tensor
    logits: Tensor
    logits_gradient: Tensor
    weight_gradient: Tensor


def route(checkpointing: str) -> list[Seen]:
    model = make_model({"activation_checkpointing": checkpointing}, CONFIG, dtype=torch.bfloat16)
    routers = [part for part in model.model.modules() if isinstance(part, Router)]
    seen: dict[nn.Module, list[Tensor]] = {router: [] for router in routers}

    def record(router: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if not seen[router]:  # the first time, not as it is recomputed
            seen[router] += [inputs[0].detach(), output.detach()]
        if output.requires_grad:
            output.register_hook(lambda gradient: seen[router].append(gradient))

    for router in routers:
        router.register_forward_hook(record)
    tokens = torch.randint(320, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    first, last = model.mesh.sample_range(SAMPLES)
    model.forward_backward(ModelInputs(tokens[first:last, :-1], tokens[first:last, 1:]), divisor=SAMPLES * LENGTH)
    gradients = [full(router.weight.grad) for router in routers]
    return [Seen(*seen[router], gradient) for router, gradient in zip(routers, gradients, strict=True)]


@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_a_router_under_fsdp_in_bf16_routes_with_the_weight_of_one_process(checkpointing: str) -> None:
    alone = Z2all(CONFIG).init_weights(0)
    routers = [part for part in alone.modules() if isinstance(part, Router)]
    ranks = on_ranks(2, route, checkpointing)
    for layer, router in enumerate(routers):
        for rank in ranks:
            assert rank[layer].tokens.dtype == torch.bfloat16
            expected = router(rank[layer].tokens)
            torch.testing.assert_close(rank[layer].logits, expected, atol=1e-6, rtol=0)
            assert torch.equal(rank[layer].logits.topk(2).indices, expected.topk(2).indices)
            gradient = sum(one[layer].logits_gradient.T @ one[layer].tokens.float() for one in ranks)
            torch.testing.assert_close(rank[layer].weight_gradient, gradient, atol=1e-6, rtol=1e-5)
