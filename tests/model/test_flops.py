"""The formula against torch's own counter, which watches the model compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zero2all.model import Z2all
from zero2all.model.cost.flops import flops_per_token
from zero2all.recipe import ModelConfig

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 320,
    "ops": {"cross_entropy": "reference"},
}
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
    assert flops.hardware(fused_attention=False) == flops.model
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


def test_a_long_sequence_costs_more_than_six_n() -> None:
    config = ModelConfig(preset="z2all-1.1b")
    short, long = flops_per_token(config, 128), flops_per_token(config, 2048)
    assert short.model - 3 * short.scores == long.model - 3 * long.scores
    assert long.scores == 16 * short.scores
