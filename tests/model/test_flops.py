"""The formula against torch's own counter, which watches the model compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tests.model.helpers import SMALL
from zero2all.base.machine.devices import GPUS
from zero2all.model import Z2all
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig

SHAPE = {**SMALL, "intermediate_size": 176, "ops": {"cross_entropy": "reference"}}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "load_balancing": "none"}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mha, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "odd vocabulary": {"vocab_size": 300},
    "moe": {"moe": MOE},
    "moe, shared, first dense": {"moe": {**MOE, "n_shared_experts": 1, "first_k_dense_replace": 1}},
}
ROWS, LENGTH = 2, 48


def grouped_mm_flops(left: Any, right: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """[N, K] x [E, K, M] by rows, or the gradient of the weights [K, N] x [N, M] by groups: 2 N K M either way."""
    return 2 * left[0] * left[1] * right[-1]


aten = torch.ops.aten
# torch counts these as nothing.
UNKNOWN_TO_TORCH = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *rest, **more: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
    aten._grouped_mm: grouped_mm_flops,
}


def counted(config: ModelConfig, recompute: bool) -> tuple[int, int]:
    """FLOPs of the forward pass, and of a forward and backward pass, over the full batch."""
    model = Z2all(config).init_weights(0)
    if recompute:
        for layer in model.layers:
            inner = layer.forward
            layer.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    tokens = torch.randint(0, 300, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    counters = [FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) for _ in range(2)]
    with counters[0]:
        loss = model(tokens[:, :-1], targets_BS=tokens[:, 1:]).sum()
    with counters[1]:
        loss.backward()
    forward, backward = (counter.get_total_flops() for counter in counters)
    return forward, forward + backward


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputing"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_formula_gives_what_torch_counts(variant: str, recompute: bool) -> None:
    config = ModelConfig.model_validate({**SHAPE, **VARIANTS[variant]})
    flops = flops_per_token(config, LENGTH)
    forward, both = counted(config, recompute)
    assert flops.forward * ROWS * LENGTH == pytest.approx(forward, rel=0.01)
    assert flops.hardware("full" if recompute else "none") * ROWS * LENGTH == pytest.approx(both, rel=0.01)


def test_plain_attention_keeps_its_scores() -> None:
    config = ModelConfig.model_validate({**SHAPE, "ops": {"attention": "reference", "cross_entropy": "reference"}})
    flops = flops_per_token(config, LENGTH)
    _, both = counted(config, recompute=False)
    assert flops.model * ROWS * LENGTH == pytest.approx(both, rel=0.01)


@pytest.mark.parametrize("window", [None, 5, 64, 100])
def test_scores_are_those_of_the_pairs(window: int | None) -> None:
    config = ModelConfig.model_validate({**SHAPE, "num_hidden_layers": 1, "sliding_window": window})
    flops = flops_per_token(config, 64)
    reach = min(window or 64, 64)
    seen = sum(1 for query in range(64) for key in range(query + 1) if query - key < reach)
    per_pair = 4 * 4 * 16  # two products of four heads of 16
    assert flops.scores == per_pair * reach
    assert flops.causal_scores == pytest.approx(per_pair * seen / 64, abs=1)
    assert flops.model - flops.causal == 3 * (flops.scores - flops.causal_scores)


A800_ROWS = [
    # Seconds per step and MFU in percent as published for z2all-1.1b on A800: 65,536 tokens per step on one device
    # (16 micro-batches of 2 x 2048), then 1,048,576 on four.
    (1, 9.85, 18.41), (1, 3.23, 56.06), (1, 8.69, 20.87), (1, 3.51, 51.70), (1, 3.37, 53.70), (1, 3.78, 47.94),
    (1, 3.60, 50.39), (1, 9.72, 18.66), (1, 3.49, 51.95), (1, 3.85, 47.09), (1, 8.75, 20.72), (1, 3.68, 49.18),
    (1, 3.55, 51.02), (1, 4.00, 45.27), (1, 3.52, 51.55), (1, 5.47, 33.14), (1, 3.95, 45.91), (1, 5.60, 32.37),
    (1, 3.64, 49.74), (1, 3.45, 52.46), (1, 3.57, 50.69), (1, 3.44, 52.73), (1, 3.28, 55.21),
    (4, 14.71, 49.33), (4, 14.30, 50.73), (4, 13.77, 52.69),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "seconds", "published"), A800_ROWS)
def test_palm_count_gives_the_published_utilization(devices: int, seconds: float, published: float) -> None:
    config = ModelConfig(preset="z2all-1.1b")
    rate = {1: 16 * 2 * 2048, 4: 16 * 8 * 2048}[devices] / seconds  # of a device
    palm = palm_flops_per_token(config, count_parameters(config).active, 2048)
    assert 100 * rate * palm / GPUS["A800"].flops == pytest.approx(published, abs=0.25)


def test_the_same_step_has_a_lower_utilization_without_the_embedding() -> None:
    config = ModelConfig(preset="z2all-1.1b")
    rate = 65_536 / 3.23  # published as 56.06%
    assert rate * flops_per_token(config, 2048).model / GPUS["A800"].flops == pytest.approx(0.510, abs=0.001)


def test_palm_counts_active_parameters_and_no_window() -> None:
    dense = ModelConfig.model_validate(SHAPE)
    windowed = dense.model_copy(update={"sliding_window": 8})
    moe = ModelConfig.model_validate({**SHAPE, "moe": MOE})
    counts = count_parameters(moe)
    assert palm_flops_per_token(windowed, 1000, 64) == palm_flops_per_token(dense, 1000, 64) == 6000 + 12 * 3 * 64 * 64
    assert counts.active < counts.total
    # By both counts a token is the same work where nothing is looked up and no norm is multiplied.
    tied = ModelConfig.model_validate({**SHAPE, "tie_word_embeddings": True})
    in_products = count_parameters(tied).in_products - count_parameters(tied).parts["norms"]
    assert palm_flops_per_token(tied, in_products, 64) == flops_per_token(tied, 64).model
