"""The short forward pass of generation computes what the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.helpers import EXPERTS, make
from zero2all.generation.rank_model import LocalModel
from zero2all.model import KVCache, ModelInputs, Z2all
from zero2all.model.decode_step import DecodeStep, join_projections

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "bias": {"qkv_bias": True},
    "qk-norm, bias": {"qk_norm": True, "qkv_bias": True},
    "wide heads": {"head_dim": 32},
    "odd vocabulary": {"vocab_size": 301},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "softcap": {"final_logit_softcapping": 10.0},
    "residual in fp32": {"residual_fp32": True},
}


@torch.inference_mode()
def decode(model: Z2all, step: DecodeStep | None, counts: list[int], steps: int = 6) -> torch.Tensor:
    """Logits after prompts of these lengths, token by token."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 300, (len(counts), max(counts)), generator=generator)
    following = torch.randint(0, 300, (steps, len(counts)), generator=generator)
    cache, found = KVCache(len(counts), 40, torch.device("cpu")), []
    model(ModelInputs(tokens, cache=cache, counts_B=torch.tensor(counts)))
    cache.advance(max(counts), torch.tensor(counts))
    cache.select(0, len(counts))
    for tokens_B in following:
        found.append(model(tokens_B[:, None], cache=cache)[:, 0] if step is None else step(tokens_B, cache))
        cache.advance(1)
    return torch.stack(found)


@pytest.mark.parametrize("counts", [[5], [5, 5, 5], [3, 9, 1, 6]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_model(variant: str, counts: list[int]) -> None:
    model = make(**VARIANTS[variant])
    plain = decode(model, None, counts)
    join_projections(model)
    fast = decode(model, DecodeStep(model), counts)
    assert (plain - fast).abs().max() < 2e-5 * plain.abs().max()


def test_in_bf16_it_differs_no_more_than_rounding() -> None:
    model = make().bfloat16()
    join_projections(model)
    plain, fast = decode(model, None, [4, 7]).float(), decode(model, DecodeStep(model), [4, 7]).float()
    assert (plain - fast).abs().max() < 0.02 * plain.abs().max()


def test_joined_matrices_share_their_memory_with_the_model() -> None:
    model = make(qkv_bias=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    join_projections(model)
    first = DecodeStep(model)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    join_projections(model)  # nothing is copied again
    assert DecodeStep(model)._layers[0].qkv.data_ptr() == first._layers[0].qkv.data_ptr()
    with torch.no_grad():  # as an optimizer does
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(decode(model, first, [3]), decode(model, DecodeStep(make_copy(model)), [3]))


def make_copy(model: Z2all) -> Z2all:
    copy = Z2all(model.config).eval()
    copy.load_state_dict(model.state_dict())
    join_projections(copy)
    return copy


def test_other_models_are_left_to_the_model_itself() -> None:
    for changes in (
        {"moe": EXPERTS},
        {"qk_norm": True, "sliding_window": 8},
        {"lora": {"rank": 2}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
    ):
        model = make(**changes)
        join_projections(model)
        assert not DecodeStep.supports(model)


def test_generation_leaves_the_storage_of_weights_alone() -> None:
    """A checkpoint may be written from it while samples are generated."""
    model = make()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    local, cache = LocalModel(model), KVCache(1, 8, torch.device("cpu"))
    with torch.inference_mode():
        for count in (3, 1, 1):
            local.generate_logits(torch.ones(1, count, dtype=torch.int64), cache, None)
            cache.advance(count)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert not DecodeStep.supports(model)
