from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.helpers import SMALL
from tests.state_bytes import state_bytes
from zero2all.model import Z2all
from zero2all.model.cost.activations import ActivationPolicy, activation_bytes
from zero2all.model.cost.model_size import (
    count_parameters,
    kv_cache_bytes_per_token,
    optimizer_state_bytes,
    weight_dtype,
)
from zero2all.model.kv_cache import KVCache
from zero2all.model.weights import set_weight_dtype
from zero2all.optim.optimizer import build_optimizers
from zero2all.recipe import ModelConfig, OptimizerRecipe

SHAPE = {**SMALL, "hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 128, "vocab_size": 512}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied, mha": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qk-norm": {"qk_norm": True},
    "bf16 residual": {"residual_fp32": False},
    "moe": {"moe": MOE},
    "moe, shared, first dense": {"moe": {**MOE, "n_shared_experts": 2, "first_k_dense_replace": 1}},
}
CPU = torch.device("cpu")


def config_of(variant: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **VARIANTS[variant], **changes})


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_add_up_to_the_model(variant: str) -> None:
    config = config_of(variant)
    counted = count_parameters(config)
    assert counted.total == sum(parameter.numel() for parameter in Z2all(config).parameters())
    assert counted.total == sum(counted.parts.values())
    assert ("head" in counted.parts) is not config.tie_word_embeddings
    if config.moe is None:
        assert counted.active == counted.total
    else:
        assert counted.total - counted.active == counted.parts["experts"] // 2  # two experts of four


def test_a_model_with_a_kernel_that_does_not_run_here_can_be_counted() -> None:
    """A laptop looks at the recipe of a GPU."""
    assert count_parameters(config_of("dense", ops={"attention": "flash"})).total > 0


def test_cache_bytes_are_those_of_the_cache() -> None:
    config = config_of("dense")
    cache = KVCache(rows=1, max_length=10, device=CPU)
    with torch.inference_mode():
        Z2all(config).init_weights(0).bfloat16()(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    assert cache.nbytes == kv_cache_bytes_per_token(config) * 10


def kept_for_backward(config: ModelConfig, tokens: int, bf16: bool) -> int:
    """Bytes that autograd holds after a forward pass, but for weights and their bf16 copies."""
    model = Z2all(config).init_weights(0)
    weights = {parameter.shape for parameter in model.parameters()}
    weights |= {shape[:-2] + shape[-2:][::-1] for shape in weights}
    held: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.shape not in weights:
            held[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    batch = torch.randint(0, 512, (tokens // 64, 65), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses = model(batch[:, :-1], targets_BS=batch[:, 1:])
        del losses
    rotary = model.rotary_2SE.untyped_storage().data_ptr()
    return sum(size for place, (size, _) in held.items() if place != rotary)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_activation_estimate_is_close_to_what_autograd_keeps(variant: str, bf16: bool) -> None:
    """Of two depths, so that what is kept once (of the loss) drops out."""
    deep, flat = config_of(variant, num_hidden_layers=5), config_of(variant, num_hidden_layers=3)
    tokens = 320  # no weight has that many rows
    kept = kept_for_backward(deep, tokens, bf16) - kept_for_backward(flat, tokens, bf16)
    estimate = activation_bytes(deep, tokens, half=bf16) - activation_bytes(flat, tokens, half=bf16)
    assert estimate == pytest.approx(kept, rel=0.08)


def test_recomputing_keeps_the_input_of_each_block() -> None:
    config = config_of("dense")
    total, less = (
        activation_bytes(config, 64, half=False, policy=ActivationPolicy(recompute)) for recompute in ("none", "full")
    )
    one_block = activation_bytes(config_of("dense", num_hidden_layers=1), 64, half=False)
    assert less == one_block + 2 * 64 * 128 * 4  # the input of the block that is computed again is in it
    assert less < total


@pytest.mark.parametrize(
    ("optimizer", "variant"),
    [
        ({"name": "adamw"}, "moe"),
        ({"name": "lion"}, "moe"),
        ({"name": "sgd"}, "dense"),
        ({"name": "sgd", "momentum": 0.0}, "dense"),
        ({"name": "muon"}, "moe"),
        ({"name": "muon"}, "dense"),
        ({"name": "adafactor"}, "moe"),
        ({"name": "adamw-bf16"}, "moe"),
        ({"name": "adamw-bf16-kahan"}, "moe"),
        ({"name": "adamw-8bit"}, "moe"),
    ],
    ids=str,
)
def test_optimizer_state_is_what_the_optimizer_holds_after_a_step(
    optimizer: dict[str, Any], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimizer["name"] == "adamw-8bit":
        pytest.importorskip("torchao", reason="needs pip install 'zero2all[quant]'")
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which would take a minute
    recipe = OptimizerRecipe.model_validate(optimizer)
    model = Z2all(config_of(variant)).init_weights(0)
    set_weight_dtype(model, weight_dtype(recipe))
    optimizers = build_optimizers(model, recipe)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in optimizers:
        one.step()
    stated = sum(optimizer_state_bytes(recipe, name, weight.shape) for name, weight in model.named_parameters())
    assert stated == state_bytes(optimizers)
